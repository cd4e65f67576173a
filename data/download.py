"""Downloads of published data sets, with limits on how long a network may take to answer."""

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
_STALLED_S = 10.0  # without a byte
_DOWNLOAD_S = 840.0  # less than other processes wait for the cache (data.cache.cached_folder)


def download(name: str, folder: Path, way_out: str) -> None:
    """Downloads the files of a data set of torchvision, which checks their hashes.

    Args:
        name: The class in ``torchvision.datasets``.
        folder: Where the files go.
        way_out: What the user can do where it fails; it ends the message.

    Raises:
        DataError: No server answers within 8 seconds, a server sends nothing for 10 seconds, the download takes more
            than 14 minutes, or torchvision is not installed.
        OSError: The disk is full.
    """
    kind = _torchvision(name, way_out)
    if not reachable(getattr(kind, "mirrors", None) or [kind.url]):
        raise DataError(f"{name} is to be downloaded, and no server that has it can be reached. {way_out}")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_STALLED_S)
    try:
        fetch(name, lambda: kind(folder, download=True), _DOWNLOAD_S, way_out)
    finally:
        socket.setdefaulttimeout(before)


def fetch(what: str, work: Callable[[], Any], timeout_s: float, way_out: str) -> Any:
    """Returns the result of a function that downloads.

    Args:
        what: The name of the data, for the message.
        work: The function.
        timeout_s: Seconds that it may take.
        way_out: What the user can do where it fails; it ends the message.

    Raises:
        DataError: It fails or takes longer.
        OSError: The disk is full.
    """
    try:
        return _within(timeout_s, work)
    except DataError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(f"downloading {what} failed ({reason}). {way_out}") from error


def reachable(urls: Sequence[str]) -> bool:
    """Whether one of some servers answers within 8 seconds, be it with an HTTP error."""
    try:
        return _within(_REACH_S, lambda: any(_answers(url, _REACH_S / len(urls)) for url in urls))
    except TimeoutError:
        return False


def _answers(url: str, timeout_s: float) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, http.client.HTTPException):
        return False
    return True


def _within(timeout_s: float, work: Callable[[], Any]) -> Any:
    """Returns work()'s result, or raises its error, or TimeoutError.

    It runs in a daemon thread because one that hangs in a name look-up or a socket cannot be ended, only left behind.
    """
    outcome: queue.Queue = queue.Queue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="download", daemon=True).start()
    try:
        result, error = outcome.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"took more than {timeout_s:.0f} s") from None
    if error is not None:
        raise error
    return result


def _torchvision(name: str, way_out: str) -> Any:
    from common.torchvision_loader import load_torchvision

    try:
        load_torchvision()
        from torchvision import datasets
    except ImportError as error:
        raise DataError(f"torchvision, which downloads {name}, cannot be imported ({error}). {way_out}") from error
    return getattr(datasets, name)
