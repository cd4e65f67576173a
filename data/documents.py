"""Text files as documents: listing, checking and splitting them."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from common.errors import DataError

_BLOCK_BYTES = 1 << 20
_PIECE_CHARS = 1 << 16
_BATCH_CHARS = 1 << 22
_MINIMUM_DOCUMENTS = 20
# Line ends at which GPT-2's pattern always splits words, so that the tokens of the pieces are those of the text: a
# single newline between two other characters, or before a space and a word.
_CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\n)(?= \S)")
# What to type for a file in UTF-16, which Windows' programs write.
TO_UTF8 = "Convert the file: iconv -f UTF-16 -t UTF-8 OLD > NEW, and type data.root=NEW"

# Source: SPLIT_KEYWORDS in github.com/huggingface/datasets, data_files.py.
_WORDS = {"train": "train training", "valid": "valid validation val dev", "test": "test testing eval evaluation"}
SPLITS = {word: split for split, words in _WORDS.items() for word in words.split()}


def split_of(path: Path) -> str:
    """Return "train", "valid" or "test", by the last word of a path that names a split; "train" if there is none."""
    named = [SPLITS[word] for word in re.findall("[a-z]+", str(path).lower()) if word in SPLITS]
    return named[-1] if named else "train"


@dataclass(frozen=True)
class Document:
    """The bytes [start, end) of a file, as UTF-8 text. ``len`` returns the number of bytes."""

    path: Path
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes, 1 MiB at a time."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            left = len(self)
            while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
                left -= len(block)
                yield block

    def text(self) -> Iterator[str]:
        """Yield the text, about 1 MiB at a time, with unchanged line ends and without a byte order mark."""
        return codecs.iterdecode(self.blocks(), "utf-8-sig" if self.start == 0 else "utf-8")

    def pieces(self, small: bool = True) -> Iterator[str]:
        """Yield the text in pieces of about 64 Ki characters that end with a line, or of 4 Mi if not ``small``."""
        held = ""
        for text in self.text():
            held += text
            start = 0
            while small and len(held) - start > _PIECE_CHARS:
                cut = _CUT.search(held, start + _PIECE_CHARS)
                if cut is None:
                    break
                yield held[start : cut.start()]
                start = cut.start()
            held = held[start:]
            if len(held) > _BATCH_CHARS:
                # For megabytes without a line end, cutting anywhere costs one odd token, and keeping them costs memory.
                yield held
                held = ""
        if held:
            yield held


def whole_file(path: Path) -> Document:
    """Return a whole file as one document."""
    return Document(path, 0, path.stat().st_size)


def find_files(root: Path, skip_folders: Collection[str] = (), suffix: str | tuple[str, ...] = "") -> list[Path]:
    """Return the files under a folder without hidden and empty ones, in the same order on every machine.

    Links are followed, but none to a folder that has been listed already.
    """
    files, listed, whole = [], set(), root.resolve()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = Path(folder).resolve()
        if real in listed and real != whole / Path(folder).relative_to(root):
            subfolders[:] = []
            continue
        listed.add(real)
        subfolders[:] = sorted(name for name in subfolders if name not in skip_folders and not name.startswith("."))
        paths = (Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith("."))
        files += [path for path in paths if path.is_file() and path.stat().st_size]
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def files_of(root: Path, what: str, suffix: str = "", packed: Sequence[str] = ()) -> list[Path]:
    """Return the file ``data.root``, or the files of that folder; raise DataError if none has content.

    ``packed`` are further endings behind ``suffix``, such as ".gz".
    """
    suffixes = (suffix, *(suffix + end for end in packed))
    files = find_files(root, (), suffixes) if root.is_dir() else [p for p in [root] if p.exists() and p.stat().st_size]
    if not files:
        problem = "holds no such file" if root.is_dir() else "is empty" if root.exists() else "does not exist"
        if root.is_dir() and (others := sorted({path.suffix for path in find_files(root) if path.suffix})):
            saved = ' (written by save_to_disk of datasets; load_from_disk(OLD).to_parquet("rows.parquet") converts it)'
            problem += f", but {', '.join(others[:9])}" + saved * (".arrow" in others)
        raise DataError(f"data.root={root} {problem}; give a file of {what}, or a folder of {suffix or 'such'} files")
    by_content: dict[Path, list[Path]] = {}
    for path in files:
        real = path.resolve()  # one file may have several names
        by_content.setdefault(real.with_suffix("") if real.suffix in packed else real, []).append(path)
    if twice := next((paths for paths in by_content.values() if len(paths) > 1), None):
        names = " and ".join(str(path.relative_to(root)) for path in twice)
        raise DataError(f"data.root={root} has {names}, whose content would be read twice; keep one of them")
    return files


def is_utf16(start: bytes) -> bool:
    """Return whether the first bytes of a text are UTF-16: its mark, or a letter of ASCII in two bytes."""
    return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or (len(start) > 1 and 0 in start[:2])


def text_problem(document: Document) -> str | None:
    """Return why a document is not text (a byte 0, or not UTF-8), in words; None if it is text."""
    try:
        return "a byte is 0, as in a binary file" if any("\0" in text for text in document.text()) else None
    except UnicodeDecodeError as error:
        if document.start == 0 and is_utf16(next(document.blocks())):
            return f"UTF-16, not UTF-8. {TO_UTF8}"
        return f"not UTF-8 ({error.reason})"


def split_documents(documents: Sequence[Document]) -> dict[str, list[Document]]:
    """Return about 90 % of the text as "train" and 5 % each as "valid" and "test", always the same.

    If there are at least 20 documents, the 10th of every 20 goes to valid and the 20th to test. Otherwise each document
    is cut at 90 % and 95 % of its length.
    """
    if len(documents) >= _MINIMUM_DOCUMENTS:
        rest = [document for i, document in enumerate(documents) if i % 20 not in (9, 19)]
        return {"train": rest, "valid": [*documents[9::20]], "test": [*documents[19::20]]}
    cut = zip(*map(_split_by_length, documents), strict=True)
    return {
        split: [part for part in parts if len(part)]
        for split, parts in zip(("train", "valid", "test"), cut, strict=True)
    }


def only_text(documents: Sequence[Document]) -> tuple[list[Document], list[str]]:
    """Return the documents that are UTF-8 text, and for each of the others its path and why it is not text."""
    problems = {document: text_problem(document) for document in documents}
    bad = [f"{document.path}: {problem}" for document, problem in problems.items() if problem]
    return [document for document, problem in problems.items() if not problem], bad


def _split_by_length(document: Document) -> list[Document]:
    """Cut a document at the line ends next to 90 % and 95 % of its length. With few lines, some parts are empty."""
    cuts = [document.start]
    for share in (0.90, 0.90 + 0.05):
        cuts.append(max(cuts[-1], _next_line(document, document.start + int(share * len(document)))))
    cuts.append(document.end)
    return [Document(document.path, start, end) for start, end in zip(cuts[:-1], cuts[1:], strict=True)]


def _next_line(document: Document, position: int) -> int:
    window = next(Document(document.path, position, min(document.end, position + _BLOCK_BYTES)).blocks(), b"")
    newline = window.find(b"\n")
    if newline >= 0:
        return position + newline + 1
    # Without a near line end, cut at the next character: in UTF-8 its first byte is outside 0x80-0xBF.
    return position + next((i for i, byte in enumerate(window) if byte & 0xC0 != 0x80), len(window))


def batches(
    documents: Iterable[Document], begin: list[int], end: list[int], small: bool = True
) -> Iterator[list[str | list[int]]]:
    """Yield pieces of text, and before and after each document's the tokens ``begin`` and ``end``, in lists.

    A list has about 4 Mi characters. See ``Document.pieces`` for ``small``.
    """
    batch: list[str | list[int]] = []
    size = 0
    for part in chain.from_iterable(chain([begin], document.pieces(small), [end]) for document in documents):
        batch.append(part)
        size += len(part)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
