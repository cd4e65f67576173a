"""Text that is already on the machine: Python's standard library, or any file or folder."""

from __future__ import annotations

import logging
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import DataError
from data.documents import Document, find_files, whole_file
from data.language import LanguageData, only_text, split_documents

logger = logging.getLogger(__name__)

# The library's tests are larger than the library, and mostly tables.
_NOT_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")


class Stdlib(LanguageData):
    """The source text of the running interpreter's standard library: about 12 MB that every machine has.

    Without its tests and without installed packages. The text differs between versions of Python.
    """

    name = "stdlib"

    def title(self) -> str:
        return f"the standard library of Python {platform.python_version()}"

    def documents(self) -> dict[str, list[Document]]:
        """Raises DataError if the library is not there as files (frozen or zipped interpreters)."""
        root = Path(sysconfig.get_path("stdlib"))
        files = find_files(root, skip_folders=_NOT_LIBRARY, suffix=".py") if root.is_dir() else []
        documents, _ = only_text([whole_file(path) for path in files])
        if not documents:
            raise DataError(
                f"data=stdlib reads the standard library's source files, and there are none in {root} "
                "(a zipped or stripped Python?). Train on other text: data=text data.root=FILE_OR_FOLDER"
            )
        return split_documents(documents)


class Text(LanguageData):
    """Any text file, or all the text files of a folder.

    Of a folder every file that is UTF-8 is taken, whatever its name, except hidden ones; others are named in
    a warning. See split_documents for the splits.
    """

    name = "text"

    def __init__(
        self, root: str | None = None, seq_len: int = 256, cache_dir: str | None = None, **options: Any
    ):
        """root: the file or folder. The others are LanguageData's.

        Raises DataError if `root` is not given; prepare() does if it is not there.
        """
        super().__init__(seq_len, cache_dir, **options)
        if not root:
            raise DataError("data=text needs to know which text: data.root=FILE_OR_FOLDER")
        self.root = Path(root).expanduser().absolute()

    def title(self) -> str:
        return f"text of {self.root}"

    def documents(self) -> dict[str, list[Document]]:
        """Raises DataError if there is no file or folder `root`, or no text in it."""
        folder = self.root.is_dir()
        if not folder and not (self.root.exists() and self.root.stat().st_size):
            problem = "is empty" if self.root.exists() else "does not exist"
            raise DataError(f"data.root={self.root} {problem}; give a file of text or a folder of such files")
        files = find_files(self.root) if folder else [self.root]
        documents, bad = only_text([whole_file(path) for path in files])
        if not documents:
            raise DataError(
                f"data.root={self.root} holds no text: looked at {len(files)} files that are neither hidden "
                f"nor empty{_first(bad)}. Give a file or folder of UTF-8 text"
            )
        if bad:
            logger.warning("left out %d of %d files, which are not text%s", len(bad), len(files), _first(bad))
        return split_documents(documents)


def _first(bad: Sequence[str], shown: int = 5) -> str:
    """The first few of a list, as the tail of a sentence."""
    if not bad:
        return ""
    more = f"; and {len(bad) - shown} more" if len(bad) > shown else ""
    return f" ({'; '.join(bad[:shown])}{more})"
