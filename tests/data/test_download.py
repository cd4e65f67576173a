"""Downloads: what is kept of them, and what is said, within seconds, where they fail."""

import shutil
import socket
import time
import urllib.request

import pytest

from common.errors import DataError
from data import cache as cache_module
from data import cifar10, images
from data.cifar10 import CIFAR10
from data.mnist import MNIST


@pytest.fixture
def by(monkeypatch):
    """Has torchvision download by a function of the test's own."""
    return lambda function: monkeypatch.setattr(images, "_torchvision", lambda name, way_out: function)


@pytest.fixture
def fails(prepared, cache):
    def check(kind, *parts: str) -> None:
        """Soon, with what the user can do, and with nothing left in the cache."""
        start, before = time.monotonic(), socket.getdefaulttimeout()
        with pytest.raises(DataError) as raised:
            prepared(kind)
        assert time.monotonic() - start < 30 and socket.getdefaulttimeout() == before
        assert [path.suffix for path in cache.iterdir()] == [".lock"]
        for part in (*parts, "data.root=FOLDER", "a network"):
            assert part in str(raised.value)

    return check


def test_a_network_that_never_answers_is_an_error(by, fails, monkeypatch):
    monkeypatch.setattr(images, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        by(lambda folder, download: urllib.request.urlopen(url))
        fails(MNIST, "downloading MNIST failed (TimeoutError: timed out)")


def test_a_download_that_breaks_off_leaves_nothing(by, fails):
    def break_off(folder, download):
        (folder / "half").write_text("half")
        raise RuntimeError("Error downloading\n  train-images")

    by(break_off)
    fails(MNIST, "failed (RuntimeError: Error downloading train-images). Give")


def test_a_download_that_never_ends_is_an_error(by, fails, monkeypatch):
    monkeypatch.setattr(cache_module, "_DOWNLOAD_S", 0.2)
    by(lambda folder, download: time.sleep(5))
    fails(CIFAR10, "downloading CIFAR10 failed (TimeoutError: took more than 0 s)")


def test_what_torchvision_leaves_is_read_and_kept(by, prepared, mnist_files):
    downloads = []

    def copy(folder, download):
        downloads.append(folder)
        shutil.copytree(mnist_files, folder / "MNIST" / "raw")

    by(copy)
    for _ in range(2):
        assert len(prepared(MNIST).train) == 110
    assert len(downloads) == 1


def test_without_torchvision_the_error_says_so(fails, monkeypatch):
    def missing():
        raise ImportError("No module named 'torchvision'")

    monkeypatch.setattr("data.images.load_torchvision", missing)
    fails(MNIST, "torchvision, which downloads MNIST, cannot be imported")


@pytest.mark.slow  # importing torchvision takes seconds
@pytest.mark.parametrize("kind", [MNIST, CIFAR10])
def test_torchvision_has_the_data_set_and_the_published_files(kind):
    known = images._torchvision(kind.__name__, "")
    assert getattr(known, "mirrors", None) or known.url
    if kind is CIFAR10:
        assert cifar10._FILES == {"train": dict(known.train_list), "test": dict(known.test_list)}
        assert known.base_folder == cifar10._FOLDER
