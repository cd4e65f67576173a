"""Prose that every machine with this project has: PyTorch's documentation of its own functions and classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

from common.errors import DataError
from data.cache import cached_folder
from data.documents import Document, split_documents
from data.language import LanguageData

_FORMAT = 1  # to be raised when the same version of torch gives another text
_FILE = "torch_docs.txt"
_MODULES = ("", ".Tensor", ".nn", ".nn.functional", ".nn.init", ".optim", ".linalg", ".fft", ".special")
_DOCUMENT_BYTES = 1000  # so small that each split has parts of every chapter
_ROLE = re.compile(r":[\w:]+:`~?([^`<]*?)\s*(?:<[^`]*>)?`")  # :class:`~torch.nn.Linear`, :ref:`title <label>`
_LETTERS = 0.9  # of a paragraph of prose, spaces included


class TorchDocs(LanguageData):
    """The paragraphs of prose in what ``help(torch.add)`` and the like show, about 500 kB of English.

    Each paragraph is one line and occurs once. Signatures, examples, formulas and markup are left out. The text differs
    a little between versions of torch, and not between versions of Python.
    """

    name = "torch_docs"

    def title(self) -> str:
        """Returns the name of the data set, with the version of torch."""
        import torch

        return f"the documentation of torch {torch.__version__}"

    def documents(self) -> dict[str, list[Document]]:
        """Returns parts of about 1 kB by split.

        Raises:
            DataError: torch comes without documentation.
        """
        import torch

        def write(folder: Path) -> None:
            (folder / _FILE).write_text("".join(f"{line}\n" for line in _paragraphs()), encoding="utf-8")

        # By the version, not by the content: collecting it takes seconds.
        path = cached_folder(self.cache_dir, f"{self.name}-text-{torch.__version__}-{_FORMAT}", write) / _FILE
        documents = _parts(path)
        if not documents:
            raise DataError(
                "data=torch_docs reads the documentation inside torch, and this torch has none (python -OO?). Train on "
                "other text: data=stdlib, or data=text data.root=FILE_OR_FOLDER"
            )
        return split_documents(documents)


def _paragraphs() -> Iterator[str]:
    seen = set()
    for documentation in _documentation():
        for paragraph in re.split(r"\n\s*\n", documentation):
            line = _ROLE.sub(r"\1", " ".join(paragraph.split())).replace("`", "")
            if line not in seen and _is_prose(line):
                seen.add(line)
                yield line


def _is_prose(line: str) -> bool:
    """Whether a paragraph is of words: no directive, formula, table, example or signature."""
    markup = line.startswith("..") or "\\" in line or ">>>" in line
    return not markup and line.count(" ") > 1 and sum(c.isalpha() or c == " " for c in line) >= _LETTERS * len(line)


def _documentation() -> Iterator[str]:
    """Yields the documentation of each public name, as it is read in a terminal."""
    for module in _MODULES:
        owner = resolve_name(f"torch{module}")
        for name in sorted(dir(owner)):
            item = getattr(owner, name)
            text = getattr(item, "__doc__", None)
            home = getattr(item, "__module__", None) or "torch"  # that of a compiled function is None
            if not name.startswith("_") and callable(item) and home.split(".")[0] == "torch" and isinstance(text, str):
                yield inspect.cleandoc(text)


def _parts(path: Path) -> list[Document]:
    """Cuts the file between its lines."""
    parts, start, end = [], 0, 0
    for line in path.read_bytes().splitlines(keepends=True):
        end += len(line)
        if end - start >= _DOCUMENT_BYTES:
            parts.append(Document(path, start, end))
            start = end
    return parts
