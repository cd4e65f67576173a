"""Text of the user: any file or folder."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from common.errors import DataError
from data.dataset import given_path
from data.documents import SPLITS, Document, files_of, only_text, split_documents, whole_file
from data.language import LanguageData

logger = logging.getLogger(__name__)


class Text(LanguageData):
    """Any text file, or all the text files of a folder.

    Every file of a folder that is UTF-8 text is used, with any name, except hidden files. The others are named in a
    warning. See data.documents.split_documents for the splits.
    """

    name = "text"

    def __init__(self, root: str | None = None, **options: Any):
        super().__init__(**options)
        self.root = given_path(root, "data=text needs the text, data.root=FILE_OR_FOLDER")
        self.title = f"text of {self.root}"

    def documents(self) -> dict[str, list[Document]]:
        """Return the files by split."""
        files = files_of(self.root, "text")
        documents, bad = only_text([whole_file(path) for path in files])
        if not documents:
            raise DataError(
                f"data.root={self.root} holds no text in the {len(files)} files that are neither hidden nor empty"
                f"{_first(bad)}. Give a file or folder of UTF-8 text"
            )
        if bad:
            logger.warning("left out %d of %d files, which are not text%s", len(bad), len(files), _first(bad))
        named = [document.path for document in documents if document.path.stem in SPLITS]
        if len({SPLITS[path.stem] for path in named}) > 1:
            logger.warning(
                "data=text divides every file, also %s; data=jsonl keeps files for training and for testing apart",
                " and ".join(path.name for path in named[:3]),
            )
        return split_documents(documents)


def _first(bad: Sequence[str], shown: int = 5) -> str:
    """Return the first few of a list, as the end of a sentence."""
    if not bad:
        return ""
    more = f"; and {len(bad) - shown} more" if len(bad) > shown else ""
    return f" ({'; '.join(bad[:shown])}{more})"
