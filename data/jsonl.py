"""JSON lines: one sample per row, the text of one or several fields in GPT-2's vocabulary."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from common.errors import DataError
from common.files import expand_home
from data.cache import cached_folder
from data.dataset import DataSet
from data.documents import find_files
from data.row_tokens import PERIOD, BucketedRows, RowSelection, TokenRows, cached_counts, key_of
from data.rows import Rows
from data.vocabulary import ExtraTokens, GPT2Vocabulary

_CHECK_ALL, _CHECK_SOME = 1_000_000, 10_000
_VALID, _TEST = 9, 19
_WORDS = {"train": "train", "test": "test", **dict.fromkeys(("valid", "validation", "val", "dev"), "valid")}


class Jsonl(DataSet):
    """A file or a folder of *.jsonl files, each row a JSON object that holds its text in one or several fields.

    A sample is a row's tokens and <|endoftext|>, cut to seq_len + 1 tokens, as inputs and as targets shifted by one,
    padded with <|endoftext|> and with targets that do not count.

    Splits: files in a folder whose path says valid (validation, val, dev) or test are these splits, all others are for
    training. Without a valid file the 10th of every 20 training rows goes to valid; without a test file as well, the
    20th to test.

    Rows are read and encoded when they are needed, by an index on the disk (see data.rows). prepare() checks up to 1
    million rows once; of more rows it checks 10,000, evenly spread, and the others as they are trained on.
    """

    def __init__(
        self,
        root: str | None = None,
        field: str | list[str] = "text",
        seq_len: int = 256,
        bucket_by_length: bool = False,
        cache_dir: str | None = None,
        num_workers: int = 0,
        extra_tokens: ExtraTokens = None,
    ):
        """Checks the arguments; prepare() reads the data.

        Args:
            root: The file or the folder of *.jsonl files; it must be given.
            field: The name of the text in a row, or a list of names whose texts are joined by newlines.
            seq_len: Tokens per row; longer rows are cut, shorter ones padded.
            bucket_by_length: Training batches of similar length, padded to few widths; the first run counts all tokens.
            cache_dir: Where index and counts are kept; null: the user's cache folder.
            num_workers: Processes that read ahead; 0: one thread.
            extra_tokens: Tokens behind GPT-2's own; the model's.

        Raises:
            DataError: ``root`` is not given, ``field`` is not a name or a list of names, or a number is out of range.
        """
        super().__init__(num_workers)
        if not root:
            raise DataError("data=jsonl needs to know which rows: data.root=FILE_OR_FOLDER")
        if seq_len < 1:
            raise DataError(f"data.seq_len={seq_len}: a sample needs at least 1 token")
        self.fields = [field] if isinstance(field, str) else field
        if not _are_names(self.fields):
            raise DataError(f"data.field={field}: give a name or a list of names, as data.field=[question,answer]")
        self.fields = list(self.fields)
        self.root = expand_home(root).absolute()
        self.vocabulary = GPT2Vocabulary(extra_tokens)
        self.vocab_size = self.vocabulary.size
        self.seq_len = seq_len
        self.changing_shapes = bucket_by_length
        self.cache_dir = cache_dir
        self._prepared = False

    def prepare(self) -> None:
        """Builds the index, checks rows and counts tokens, unless the cache says that it was done before.

        Raises:
            DataError: There are no rows, or a row is without its text. It names the file and the line.
        """
        if self._prepared:
            return
        files = split_files(self.root)
        rows = {split: Rows(paths, self.cache_dir) for split, paths in files.items()}
        for part in rows.values():
            self._check(part)
        taken = {"valid": _VALID} if "valid" not in rows else {}
        if rows.keys() == {"train"}:
            taken["test"] = _TEST
        kept = tuple(i for i in range(PERIOD) if i not in taken.values())
        train = RowSelection(len(rows["train"]), kept)
        if self.changing_shapes:
            counts = cached_counts(rows["train"], self.fields, self.vocabulary, self.cache_dir)
            self.train = BucketedRows(rows["train"], train, self.fields, self.vocabulary, self.seq_len, counts)
        else:
            self.train = TokenRows(rows["train"], train, self.fields, self.vocabulary, self.seq_len)
        self.valid, self.test = self._held_out("valid", rows, taken), self._held_out("test", rows, taken)
        self.description = self._describe()
        self._prepared = True

    def _held_out(self, split: str, rows: dict[str, Rows], taken: dict[str, int]) -> TokenRows | None:
        if split in rows:
            part, selection = rows[split], RowSelection(len(rows[split]), tuple(range(PERIOD)))
        elif split in taken:
            part, selection = rows["train"], RowSelection(len(rows["train"]), (taken[split],))
        else:
            return None
        return TokenRows(part, selection, self.fields, self.vocabulary, self.seq_len) if len(selection) else None

    def _check(self, rows: Rows) -> None:
        def check(folder: Path) -> None:
            if len(rows) <= _CHECK_ALL:
                for _ in rows.texts_in_order(self.fields):
                    pass
            else:
                for indices in np.array_split(np.linspace(0, len(rows) - 1, _CHECK_SOME, dtype=np.int64), 100):
                    rows.texts(indices, self.fields)

        # An empty folder in the cache says that the rows were checked.
        cached_folder(self.cache_dir, f"checked-{key_of(rows, self.fields)}", check, timeout_s=rows.patience_s())

    def _describe(self) -> str:
        splits = (("train", self.train), ("valid", self.valid), ("test", self.test))
        parts = [f"{split} {len(source) if source else 0:,} rows" for split, source in splits]
        widths = self.train.widths if isinstance(self.train, BucketedRows) else (self.seq_len,)
        padded = f"padded to {' or '.join(map(str, widths))} tokens"
        return f"JSON lines of {self.root}, {self.vocabulary.label}: {', '.join(parts)}, {padded}"


def split_files(root: Path) -> dict[str, list[Path]]:
    """Returns the files of "train" and, where their paths say so, of "valid" and "test".

    Args:
        root: A file or a folder.

    Raises:
        DataError: It does not exist, is empty, or holds nothing to train on.
    """
    if not root.exists():
        raise DataError(f"data.root={root} does not exist; give a file of JSON lines or a folder of *.jsonl files")
    if not root.is_dir():
        if root.stat().st_size == 0:
            raise DataError(f"data.root={root} is empty; give a file of JSON lines")
        return {"train": [root]}
    files = find_files(root, suffix=".jsonl")
    if not files:
        raise DataError(f"data.root={root} holds no *.jsonl file that is not empty; give a folder that does")
    splits: dict[str, list[Path]] = {}
    for path in files:
        words = re.findall("[a-z]+", str(path.relative_to(root)).lower())
        said = [_WORDS[word] for word in words if word in _WORDS]
        splits.setdefault(said[-1] if said else "train", []).append(path)
    if "train" not in splits:
        names = ", ".join(path.name for path in files[:5])
        raise DataError(
            f"data.root={root} has nothing to train on: by their names all files are for validation or testing "
            f"({names}). Rename one, or give a file by data.root=FILE"
        )
    return splits


def _are_names(fields: object) -> bool:
    try:
        names = list(fields)
    except TypeError:
        return False
    return bool(names) and all(isinstance(name, str) and name for name in names)
