"""WikiText-2 (Merity et al., "Pointer Sentinel Mixture Models", 2016), from a folder or from Hugging Face."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from common.errors import DataError
from common.files import expand_home
from data.cache import cached_folder, downloading, first_file
from data.documents import Document, text_problem, whole_file
from data.language import LanguageData

_NAMES = ("{}.txt", "wiki.{}.tokens", "wiki.{}.raw")
_WAY_OUT = (
    "Either give a folder that holds train.txt, valid.txt and test.txt (or wiki.train.tokens and so on) by "
    "data.root=FOLDER, or let it be downloaded: pip install datasets, and a network"
)


class WikiText2(LanguageData):
    """About 2 million words of Wikipedia with their own three splits; each split is one document."""

    name, title = "wikitext2", "WikiText-2"
    min_word_frequency = 1  # as published: rare words are <unk> in the files already

    def __init__(self, root: str | None = None, **options: Any):
        super().__init__(**options)
        self.root = None if not root else expand_home(root).absolute()

    def documents(self) -> dict[str, list[Document]]:
        """Return the document of each split."""
        root = self.root
        if root is None:
            root = cached_folder(self.cache_dir, "wikitext-2-v1", _download)
        names = {split: [name.format(split) for name in _NAMES] for split in ("train", "valid", "test")}
        documents = {split: whole_file(first_file(root, those, _WAY_OUT)) for split, those in names.items()}
        for document in documents.values():
            if problem := text_problem(document):
                raise DataError(f"{document.path} is not text: {problem}. {_WAY_OUT}")
        return {split: [document] for split, document in documents.items()}


def _download(folder: Path) -> None:
    """Write the three files as they were published. Hugging Face has them line by line."""
    with downloading("WikiText-2", _WAY_OUT):
        splits = _load()
    for split, lines in splits.items():
        # The published files write an empty line as a space, which Hugging Face's copy drops.
        (folder / f"{split}.txt").write_text("".join(line or " \n" for line in lines), encoding="utf-8")


def _load() -> dict[str, list[str]]:
    """Return the lines of each split, from the network or from Hugging Face's own cache."""
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"data=wikitext2 has no data.root, and the package `datasets` is not installed. {_WAY_OUT}")
    import datasets  # pyright: ignore[reportMissingImports]  # an optional package, see above

    loaded = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-v1")
    names = {"train": "train", "valid": "validation", "test": "test"}
    return {split: list(loaded[name]["text"]) for split, name in names.items()}
