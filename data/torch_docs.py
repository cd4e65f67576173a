"""English text on every machine with this project: PyTorch's documentation of its functions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from common.errors import DataError
from data.cache import cached_folder
from data.documents import Document, split_documents
from data.language import LanguageData

_FORMAT = 3  # must be increased when the same version of torch gives another text
_FILE = "torch_docs.txt"
_DOCUMENT_BYTES = 1000  # so small that each split has parts of every chapter
_LEFT_OUT = re.compile(r">>>|\\|Examples?::?$|^\S*$")  # examples, formulas, and lines of one word


class TorchDocs(LanguageData):
    """The text that ``help(torch.add)`` and the like show: about 400 kB of English in a formulaic style, with markup.

    Each paragraph is one line. Examples and formulas are left out, and text that is the same for two names occurs once.
    The text differs a little between versions of torch, but not between versions of Python.
    """

    name = "torch_docs"

    def documents(self) -> dict[str, list[Document]]:
        """Return parts of about 1 kB by split."""
        self.title = f"the documentation of torch {torch.__version__}"

        def write(folder: Path) -> None:
            (folder / _FILE).write_text("".join(f"{line}\n" for line in _paragraphs()), encoding="utf-8")

        # The name has the version and not a hash of the content, which takes seconds to collect.
        path = cached_folder(self.cache_dir, f"{self.name}-text-{torch.__version__}-{_FORMAT}", write) / _FILE
        documents = _parts(path)
        if not documents:
            raise DataError(
                "data=torch_docs reads the documentation inside torch, and this torch has none (python -OO?). Train on "
                "other text: data=stdlib, or data=text data.root=FILE_OR_FOLDER"
            )
        return split_documents(documents)


def _paragraphs() -> Iterator[str]:
    for documentation in dict.fromkeys(_documentation()):
        lines = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", documentation))
        yield from (line for line in lines if not _LEFT_OUT.search(line))


def _documentation() -> Iterator[str]:
    """Yield the documentation of each public name of torch, as it is read in a terminal."""
    for name in sorted(dir(torch)):
        item = getattr(torch, name)
        text = getattr(item, "__doc__", None)
        home = getattr(item, "__module__", None) or "torch"  # it is None for a compiled function
        if not name.startswith("_") and callable(item) and home.split(".")[0] == "torch" and isinstance(text, str):
            yield inspect.cleandoc(text)


def _parts(path: Path) -> list[Document]:
    """Cut the file between its lines."""
    parts, start, end = [], 0, 0
    for line in path.read_bytes().splitlines(keepends=True):
        end += len(line)
        if end - start >= _DOCUMENT_BYTES:
            parts.append(Document(path, start, end))
            start = end
    return parts
