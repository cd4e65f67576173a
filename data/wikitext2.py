"""WikiText-2 (Merity et al., "Pointer Sentinel Mixture Models", 2016), from a folder or Hugging Face."""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import DataError
from data.cache import cached_folder
from data.documents import Document, text_problem, whole_file
from data.language import LanguageData

_NAMES = ("{}.txt", "wiki.{}.tokens", "wiki.{}.raw")
_ANSWER_TIMEOUT_S = 5.0
_DOWNLOAD_TIMEOUT_S = 120.0
_WAYS_OUT = (
    "Either give a folder that holds train.txt, valid.txt and test.txt (or wiki.train.tokens and so on) by "
    "data.root=FOLDER, or let it be downloaded: pip install datasets, and a network"
)


class WikiText2(LanguageData):
    """About 2 million words of Wikipedia, with its own three splits; each split is one document."""

    name = "wikitext2"
    min_word_frequency = 1  # as published: rare words are <unk> in the files already

    def __init__(
        self, root: str | None = None, seq_len: int = 256, cache_dir: str | None = None, **options: Any
    ):
        """root: a folder with the three files; None: download them through Hugging Face `datasets`.

        The others are LanguageData's.
        """
        super().__init__(seq_len, cache_dir, **options)
        self.root = None if not root else Path(root).expanduser().absolute()

    def title(self) -> str:
        return "WikiText-2"

    def documents(self) -> dict[str, list[Document]]:
        """Raises DataError if a file is missing or is not text, or if the download fails."""
        root = self.root
        if root is None:
            root = cached_folder(self.cache_dir, "wikitext-2-v1", _download)
        documents = {split: whole_file(_find(root, split)) for split in ("train", "valid", "test")}
        for document in documents.values():
            if problem := text_problem(document):
                raise DataError(f"{document.path} is not text: {problem}. {_WAYS_OUT}")
        return {split: [document] for split, document in documents.items()}


def _find(root: Path, split: str) -> Path:
    if not root.is_dir():
        raise DataError(f"data.root={root} is not a folder that exists. {_WAYS_OUT}")
    names = [name.format(split) for name in _NAMES]
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(f"data.root={root} holds none of {', '.join(names)}. {_WAYS_OUT}")


def _download(folder: Path) -> None:
    """Writes the three files as they were published (Hugging Face gives them line by line)."""
    for split, lines in _within_time(_load).items():
        # The published files write an empty line as a space, which Hugging Face's copy drops.
        (folder / f"{split}.txt").write_text("".join(line or " \n" for line in lines), encoding="utf-8")


def _load() -> dict[str, list[str]]:
    """The lines of each split, from the network or from what Hugging Face's own cache kept of it."""
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"data=wikitext2 has no data.root, and the package `datasets` is not installed. {_WAYS_OUT}"
        )
    if not _reachable(os.environ.get("HF_ENDPOINT") or "https://huggingface.co"):
        # Read when the libraries are imported. Without it they retry for 25 s before they give up.
        os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets

    loaded = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-v1")
    names = {"train": "train", "valid": "validation", "test": "test"}
    return {split: list(loaded[name]["text"]) for split, name in names.items()}


def _reachable(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=_ANSWER_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _within_time(work: Callable[[], Any]) -> Any:
    """work()'s result, or a DataError when it fails or takes longer than 2 minutes.

    The thread is a daemon because a download that hangs in a socket cannot be ended, only left behind.
    """
    result: queue.Queue = queue.Queue()

    def run() -> None:
        try:
            result.put((work(), None))
        except BaseException as error:
            result.put((None, error))

    threading.Thread(target=run, name="wikitext2-download", daemon=True).start()
    try:
        value, error = result.get(timeout=_DOWNLOAD_TIMEOUT_S)
    except queue.Empty:
        raise DataError(
            f"downloading WikiText-2 took more than {_DOWNLOAD_TIMEOUT_S:.0f} s. {_WAYS_OUT}"
        ) from None
    if isinstance(error, DataError):
        raise error
    if error is not None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise DataError(f"downloading WikiText-2 failed ({reason}). {_WAYS_OUT}") from error
    return value
