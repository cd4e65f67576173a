"""Text that every machine has: the source files of Python's standard library."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path

from common.errors import DataError
from data.documents import Document, find_files, only_text, split_documents, whole_file
from data.language import LanguageData

# The library's tests are larger than the library, and mostly tables.
_NOT_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")


class Stdlib(LanguageData):
    """The source text of the running interpreter's standard library, about 12 MB.

    Its tests and installed packages are left out. The text differs between versions of Python.
    """

    name, title = "stdlib", f"the standard library of Python {platform.python_version()}"

    def documents(self) -> dict[str, list[Document]]:
        """Return the source files by split."""
        root = Path(sysconfig.get_path("stdlib"))
        files = find_files(root, skip_folders=_NOT_LIBRARY, suffix=".py") if root.is_dir() else []
        documents, _ = only_text([whole_file(path) for path in files])
        if not documents:
            raise DataError(
                f"data=stdlib reads the standard library's source files, and there are none in {root} "
                "(a zipped or stripped Python?). Train on other text: data=text data.root=FILE_OR_FOLDER"
            )
        return split_documents(documents)
