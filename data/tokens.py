"""Token shards, the .bin files that llm.c and nanoGPT write and train on."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from common.errors import DataError
from data.cache import MappedFile
from data.dataset import DataSet, Source, by_part, check_at_least, given_path, once
from data.documents import files_of, split_of
from data.packing import PackedRows, Packing, Stream
from data.token_windows import TokenWindows, shifted
from data.vocabulary import GPT2_VOCAB_SIZE, ExtraTokens, choose_vocabulary

# The magic number and the version in a header, and the dtype of the tokens: of GPT-2's and of Llama 3's.
HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_HEADER_BYTES = 256 * 4
_LOOKED_AT = 1 << 24  # tokens that are checked before the run, over all files; the others when they are read


class Tokens(DataSet):
    """Tokenized text in one .bin file or in the .bin files of a folder. Nothing is copied.

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
        extra_tokens: ExtraTokens = None,
        tokenizer: str | None = None,
        dtype: str | None = None,
        packing: Packing = False,
        **options: Any,
    ):
        super().__init__(**options)
        self.root = given_path(root, "data=tokens needs .bin files, data.root=FILE_OR_FOLDER")
        check_at_least(1, seq_len=seq_len, vocab_size=vocab_size)
        vocabulary = choose_vocabulary(tokenizer, extra_tokens)
        if vocab_size == GPT2_VOCAB_SIZE:
            vocab_size = vocabulary.size
        self.vocabulary = vocabulary if tokenizer is not None or vocab_size == vocabulary.size else None
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.format, self.dtype, self.packing = format, dtype, packing
        if packing and self.vocabulary is None:
            said = "the token that ends a document: name the vocabulary that has it, data.tokenizer=FOLDER"
            raise DataError(f"data.packing needs {said}")
        with suppress(TypeError):
            if dtype is None or np.dtype(dtype).kind in "iu":
                return
        raise DataError(f"data.dtype={dtype} is not a type of whole numbers, such as uint16, uint32 or int64")

    @once
    def prepare(self) -> None:
        """Map the files, and check their first tokens. The others are checked when they are read."""
        suffix = ".npy" if self.root.is_dir() and not any(self.root.rglob("*.bin")) else ".bin"
        paths = files_of(self.root, "tokens", suffix)
        splits: dict[str, list[MappedFile]] = {"train": [], "valid": [], "test": []}
        for path in paths:
            file = read_header(path, self.format, self.dtype)
            check_tokens(path, file.array[: _LOOKED_AT // len(paths)], self.vocab_size)
            splits[split_of(path.relative_to(self.root))].append(file)
        if self.root.is_file():
            splits = _cut(*splits["train"])
        sources = {split: self._samples(part) for split, part in splits.items()}
        if not sources["train"]:
            tokens = ", ".join(f"{file.path.name}: {file.count:,}" for file in splits["train"][:5])
            raise DataError(
                f"data.root={self.root} has no sample to train on: a file needs {self.seq_len + 1:,} tokens for one "
                f"sample of data.seq_len={self.seq_len} ({tokens or 'by their names no file is for training'}). "
                "Lower data.seq_len or give more tokens"
            )
        self.train = sources["train"]
        if isinstance(self.train, PackedRows) and len(self.train.documents) <= len(splits["train"]):
            said = f"in {self.root} no document ends with the token {self.train.documents.end}"
            raise DataError(f"data.packing: {said}; name the tokenizer that wrote the tokens, data.tokenizer=FOLDER")
        self.valid, self.test = sources["valid"] or None, sources["test"] or None
        parts = (
            f"{split} {sum(file.count for file in part):,} tokens ({len(sources[split]):,} samples)"
            for split, part in splits.items()
        )
        packed = f", packed ({self.train.described})" if isinstance(self.train, PackedRows) else ""
        self.description = f"token shards of {self.root} ({len(paths):,}){packed}: {', '.join(parts)}"

    def _samples(self, files: Sequence[MappedFile]) -> Shards | PackedRows:
        if not self.packing or self.vocabulary is None:
            return Shards(files, self.seq_len, self.vocab_size)
        documents = Stream(
            files, self.vocabulary.end, self.cache_dir, partial(check_tokens, vocab_size=self.vocab_size)
        )
        return PackedRows(documents, self.seq_len, self.packing != "whole", self.cache_dir)


class Shards(Source):
    """The samples of several files, one file after the other. Their tokens are checked when they are read."""

    def __init__(self, files: Sequence[MappedFile], seq_len: int, vocab_size: int):
        """Use the files that have a sample."""
        self.shards = [TokenWindows(file, seq_len) for file in files if file.count > seq_len]
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self._starts = np.cumsum([0, *map(len, self.shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 [b, seq_len]; raise DataError for a token outside the vocabulary."""
        indices = np.asarray(indices, dtype=np.int64)
        tokens = np.empty((len(indices), self.seq_len + 1), np.int64)
        for number, mine in by_part(self._starts, indices):
            shard = self.shards[number]
            tokens[mine] = shard.windows(indices[mine] - self._starts[number])
            check_tokens(shard.file.path, tokens[mine], self.vocab_size)
        return shifted(tokens)


def check_tokens(path: Path, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise DataError if one of the tokens of a file is negative or not below ``vocab_size``."""
    least, largest = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if least < 0 or largest >= vocab_size:
        raise DataError(
            f"{path} holds the token {least or largest:,}, outside a vocabulary of data.vocab_size={vocab_size:,}. "
            "Name the vocabulary with which it was written, data.tokenizer=FOLDER or data.vocab_size=N, and for a file "
            "without a header the type, data.dtype=uint32 or another. If they are right, the file is damaged"
        )


def read_header(path: Path, format: str = "auto", dtype: str | None = None) -> MappedFile:
    """Return the tokens of a shard, which its size and header determine.

    llmc: a header of 256 little-endian int32 (a magic number, a version, the number of tokens, zeros), then the tokens
    as uint16 or, of version 7, uint32 (llm.c, dev/data/data_common.py). nanogpt: only tokens, uint16 unless ``dtype``
    says another type. auto: llmc, with an error that names the other format, because any file looks like tokens without
    a header. A .npy file is read in any format.
    """
    with open(path, "rb") as file:
        start = file.read(12).ljust(12, b"\0")
    magic, version, count = struct.unpack("<iii", start)
    stored, offset = HEADERS.get((magic, version)), _HEADER_BYTES
    if start.startswith(b"\x93NUMPY"):
        try:
            array = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise DataError(f"{path} cannot be read ({error}). Write or download it again") from None
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(f"{path} holds {array.dtype} {list(array.shape)}, not the whole numbers of tokens, [n]")
        stored, offset, count = array.dtype.str, array.offset, len(array)
    elif format == "nanogpt" and stored is None:
        return _without_header(path, dtype)
    elif format == "nanogpt":
        raise DataError(f"{path} has llm.c's header, but data.format=nanogpt has none. Leave out data.format")
    elif stored is None:
        raise DataError(
            f"{path} does not start with llm.c's header (the numbers 20240520 and 1 for GPT-2's tokens, or 20240801 "
            f"and 7 for Llama 3's, not {magic} and {version}). For tokens without a header, as of nanoGPT, or of "
            "Megatron-LM beside an .idx file, set data.format=nanogpt, and data.dtype=uint32 if they have 32 bits"
        )
    if dtype is not None and np.dtype(dtype) != np.dtype(stored):
        raise DataError(f"{path} has tokens of {np.dtype(stored)}, not of data.dtype={dtype}. Leave out data.dtype")
    size, expected = path.stat().st_size, offset + count * np.dtype(stored).itemsize
    if count < 1 or size != expected:
        raise DataError(
            f"{path} is truncated or damaged: a file with the {count:,} tokens of its header has {expected:,} bytes, "
            f"but it has {size:,}. Write or download it again"
        )
    return MappedFile(path, stored, offset, count)


def _without_header(path: Path, dtype: str | None) -> MappedFile:
    kind, size = np.dtype(dtype or "<u2"), path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(4096)
    if (start.isascii() and min(start) > 8) or start.startswith(b"PK\3\4"):  # tokens have bytes of all kinds
        raise DataError(f"{path} is a text or an archive, not tokens. Read texts by data=text, and save tokens as .npy")
    if size % kind.itemsize:
        raise DataError(
            f"{path} has {size:,} bytes, but a token of {kind} has {kind.itemsize}. Set data.dtype= to the type with "
            "which it was written, or write or download it again"
        )
    file = MappedFile(path, kind.str)
    first = file.array[:_LOOKED_AT]
    if dtype is None and len(first) > 1 and first[1::2].max() < 8:  # of a vocabulary below 524,288
        raise DataError(
            f"{path} has tokens of more than 16 bits: as uint16, every second number is below 8. Set data.dtype="
            f"{'uint32' if first[2::4].any() else 'uint64'}, or data.dtype=uint16 if they are tokens of 16 bits"
        )
    return file


def _cut(file: MappedFile) -> dict[str, list[MappedFile]]:
    first, second = file.count * 90 // 100, file.count * 95 // 100
    parts = {"train": (0, first), "valid": (first, second), "test": (second, file.count)}
    return {
        split: [MappedFile(file.path, file.dtype, file.offset + start * file.array.itemsize, end - start)]
        for split, (start, end) in parts.items()
    }
