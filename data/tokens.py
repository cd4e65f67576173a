"""Token shards, the .bin files that llm.c and nanoGPT write and train on."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from common.errors import DataError
from common.files import expand_home
from data.cache import MappedFile
from data.dataset import DataSet, Source, check_at_least, once
from data.documents import files_of, split_of
from data.token_windows import Concatenated, TokenWindows
from data.vocabulary import GPT2_VOCAB_SIZE, ExtraTokens, GPT2Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

MAGIC, VERSION = 20240520, 1
_HEADER_BYTES = 256 * 4
_DTYPE = np.dtype("<u2")


class Tokens(DataSet):
    """Tokenised text in one .bin file or in the .bin files of a folder. Nothing is copied.

    A folder's files belong to the split that a word of their paths names, as in fineweb_train_000001.bin,
    val/000001.bin and test.bin; without such a word, to train. A single file with any name is cut into 90 %,
    5 % and 5 %.
    """

    seq_len: int
    vocab_size: int

    def __init__(
        self,
        root: str | None = None,
        seq_len: int = 256,
        format: Literal["auto", "llmc", "nanogpt"] = "auto",
        vocab_size: int = GPT2_VOCAB_SIZE,
        cache_dir: str | None = None,
        num_workers: int = 0,
        extra_tokens: ExtraTokens = None,
    ):
        super().__init__(num_workers)
        if not root:
            raise DataError("data=tokens needs .bin files, data.root=FILE_OR_FOLDER")
        check_at_least(1, seq_len=seq_len, vocab_size=vocab_size)
        self.root = expand_home(root).absolute()
        vocabulary = GPT2Vocabulary(extra_tokens)
        if vocab_size == GPT2_VOCAB_SIZE:
            vocab_size = vocabulary.size
        self.vocabulary = vocabulary if vocab_size == vocabulary.size else None
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.format = format

    @once
    def prepare(self) -> None:
        """Map the files. Tokens are checked when they are read."""
        files = [read_header(path, self.format) for path in files_of(self.root, "tokens", ".bin")]
        splits = _cut(files[0]) if self.root.is_file() else _by_name(files, self.root)
        sources = {split: self._source(part) for split, part in splits.items()}
        if sources["train"] is None:
            tokens = ", ".join(f"{file.path.name}: {file.count:,}" for file in splits["train"][:5])
            raise DataError(
                f"data.root={self.root} has no sample to train on: a file needs {self.seq_len + 1:,} tokens for one "
                f"sample of data.seq_len={self.seq_len} ({tokens or 'by their names no file is for training'}). "
                "Lower data.seq_len or give more tokens"
            )
        self.train, self.valid, self.test = sources["train"], sources["valid"], sources["test"]
        parts = (
            f"{split} {sum(file.count for file in part):,} tokens ({len(sources[split] or ()):,} samples)"
            for split, part in splits.items()
        )
        self.description = f"token shards of {self.root} ({len(files):,}): {', '.join(parts)}"

    def _source(self, files: Sequence[MappedFile]) -> Source | None:
        windows = [Shard(file, self.seq_len, self.vocab_size) for file in files if file.count > self.seq_len]
        return Concatenated(windows) if windows else None


class Shard(TokenWindows):
    """Samples of a file that may be of another vocabulary."""

    def __init__(self, file: MappedFile, seq_len: int, vocab_size: int):
        super().__init__(file, seq_len)
        self.vocab_size = vocab_size

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        """See TokenWindows. Raises DataError if a token is not below ``vocab_size``."""
        inputs, targets = super().read(indices, epoch)
        largest = max(int(inputs.max()), int(targets.max()))
        if largest >= self.vocab_size:
            raise DataError(
                f"{self.file.path} holds the token {largest:,}, outside a vocabulary of "
                f"data.vocab_size={self.vocab_size:,}. Set data.vocab_size to the size with which the file was "
                "written; if it is that already, the file is damaged or of another format"
            )
        return inputs, targets


def read_header(path: Path, format: str = "auto") -> MappedFile:
    """Return the tokens of a shard, which its size and header determine.

    llmc: a header of 256 little-endian int32 (20240520, 1, number of tokens, zeros), then the tokens as uint16 (llm.c,
    dev/data/data_common.py). nanogpt: only uint16 tokens. auto: llmc, with an error that names the other format,
    because any file looks like tokens without a header.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        magic, version, count = struct.unpack("<iii", file.read(12).ljust(12, b"\0"))
    if format == "nanogpt":
        if magic == MAGIC:
            raise DataError(f"{path} has llm.c's header, but data.format=nanogpt has none. Leave out data.format")
        return MappedFile(path, _DTYPE.str, 0, size // _DTYPE.itemsize)
    if (magic, version) != (MAGIC, VERSION):
        raise DataError(
            f"{path} does not start with llm.c's header of GPT-2's tokens (the numbers {MAGIC} and {VERSION}, not "
            f"{magic} and {version}). If it has 16-bit tokens without a header, as nanoGPT writes them, set "
            "data.format=nanogpt"
        )
    expected = _HEADER_BYTES + count * _DTYPE.itemsize
    if count < 1 or size != expected:
        raise DataError(
            f"{path} is truncated or damaged: a file with the {count:,} tokens of its header has {expected:,} bytes, "
            f"but it has {size:,}. Write or download it again"
        )
    return MappedFile(path, _DTYPE.str, _HEADER_BYTES, count)


def _by_name(files: Sequence[MappedFile], root: Path) -> dict[str, list[MappedFile]]:
    splits: dict[str, list[MappedFile]] = {"train": [], "valid": [], "test": []}
    for file in files:
        splits[split_of(file.path.relative_to(root).with_suffix(""))].append(file)
    return splits


def _cut(file: MappedFile) -> dict[str, list[MappedFile]]:
    first, second = file.count * 90 // 100, file.count * 95 // 100
    parts = {"train": (0, first), "valid": (first, second), "test": (second, file.count)}
    return {
        split: [MappedFile(file.path, file.dtype, file.offset + start * _DTYPE.itemsize, end - start)]
        for split, (start, end) in parts.items()
    }
