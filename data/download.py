"""Downloads of published data sets by torchvision, which by itself waits for ever where a network does not answer."""

from __future__ import annotations

import errno
import http.client
import queue
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.errors import DataError

_REACH_S = 8.0  # for any of the servers to answer at all
_SILENCE_S = 10.0  # without a byte
_WHOLE_S = 840.0  # less than others wait for the cache (data.cache.cached_folder)


def download(name: str, folder: Path, ways_out: str) -> None:
    """Lets torchvision.datasets.`name` download its files into `folder`, and check their hashes.

    Raises DataError, which ends with `ways_out`: within 8 seconds if no server answers, if a server falls silent for
    10 seconds, after 14 minutes, or if torchvision is not installed. A full disk is an OSError.
    """
    kind = _torchvision(name, ways_out)
    if not _within(_REACH_S, lambda: _reachable(getattr(kind, "mirrors", None) or [kind.url]), otherwise=False):
        raise DataError(f"{name} is to be downloaded, and no server that has it can be reached. {ways_out}")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENCE_S)
    try:
        _within(_WHOLE_S, lambda: kind(folder, download=True))
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(f"downloading {name} failed ({reason}). {ways_out}") from error
    finally:
        socket.setdefaulttimeout(before)


def _torchvision(name: str, ways_out: str) -> Any:
    # A matter of how torchvision is installed and not of models, although the module lies there.
    from common.torchvision_loader import load_torchvision

    try:
        load_torchvision()
        from torchvision import datasets
    except ImportError as error:
        raise DataError(f"torchvision, which downloads {name}, cannot be imported ({error}). {ways_out}") from error
    return getattr(datasets, name)


def _reachable(urls: Sequence[str]) -> bool:
    for url in urls:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_REACH_S / len(urls)).close()
            return True
        except urllib.error.HTTPError:
            return True
        except (OSError, http.client.HTTPException):
            continue
    return False


_NO_DEFAULT: Any = object()


def _within(seconds: float, work: Callable[[], Any], otherwise: Any = _NO_DEFAULT) -> Any:
    """work()'s result; after `seconds` it is `otherwise`, or a TimeoutError.

    The thread is a daemon because one that hangs in a name look-up cannot be ended, only left behind.
    """
    result: queue.Queue = queue.Queue()

    def run() -> None:
        try:
            result.put((work(), None))
        except BaseException as error:
            result.put((None, error))

    threading.Thread(target=run, name="download", daemon=True).start()
    try:
        value, error = result.get(timeout=seconds)
    except queue.Empty:
        if otherwise is not _NO_DEFAULT:
            return otherwise
        raise TimeoutError(f"took more than {seconds:.0f} s") from None
    if error is not None:
        raise error
    return value
