"""Downloads by torchvision: what is kept of them, and what is said where they fail."""

import socket
import time

import pytest

from common.errors import DataError
from data import cifar10, download, mnist
from data.cifar10 import CIFAR10
from data.mnist import MNIST

SERVER = "http://somewhere"


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def by(monkeypatch):
    """Has torchvision download by a function of the test's own, from a server that answers."""

    def use(function, reachable=True):
        function.mirrors = [SERVER]
        monkeypatch.setattr(download, "_torchvision", lambda name, way_out: function)
        if reachable:
            monkeypatch.setattr(download, "reachable", lambda urls: urls == [SERVER])

    return use


@pytest.fixture
def fails(prepared, cache):
    def check(kind, *parts: str) -> None:
        """At once, with what the user can do, and with nothing left in the cache."""
        start, before = time.monotonic(), socket.getdefaulttimeout()
        with pytest.raises(DataError) as raised:
            prepared(kind)
        assert time.monotonic() - start < 30 and socket.getdefaulttimeout() == before
        assert [path.suffix for path in cache.iterdir()] == [".lock"]
        for part in (*parts, "data.root=FOLDER", "a network"):
            assert part in str(raised.value)

    return check


@pytest.mark.parametrize("kind", [MNIST, CIFAR10])
def test_offline_is_an_error_at_once_with_both_ways_out(kind, by, fails, monkeypatch):
    by(lambda folder, download: pytest.fail("downloaded"), reachable=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    fails(kind, "no server that has it can be reached")


def test_a_network_that_never_answers_is_an_error_too(by, fails, monkeypatch):
    by(lambda folder, download: pytest.fail("downloaded"), reachable=False)
    monkeypatch.setattr(download, "_REACH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{silent.getsockname()[1]}")
        fails(MNIST, "no server that has it can be reached")


def test_a_download_that_breaks_off_leaves_nothing(by, fails):
    def break_off(folder, download):
        (folder / "half").write_text("half")
        raise RuntimeError("Error downloading\n  train-images")

    by(break_off)
    fails(MNIST, "failed (RuntimeError: Error downloading train-images). Give")


def test_a_download_that_never_ends_is_an_error(by, fails, monkeypatch):
    monkeypatch.setattr(download, "_DOWNLOAD_S", 0.2)
    by(lambda folder, download: time.sleep(5))
    fails(CIFAR10, "downloading CIFAR10 failed (TimeoutError: took more than 0 s)")


@pytest.mark.slow  # importing torchvision takes seconds
@pytest.mark.parametrize("kind, module", [(MNIST, mnist), (CIFAR10, cifar10)])
def test_torchvision_has_the_data_set_and_names_servers(kind, module):
    known = download._torchvision(kind.__name__, "")
    assert getattr(known, "mirrors", None) or known.url
    if kind is CIFAR10:
        assert module._FILES == {"train": dict(known.train_list), "test": dict(known.test_list)}
        assert known.base_folder == module._FOLDER


def test_without_torchvision_the_error_says_so(monkeypatch):
    def missing():
        raise ImportError("No module named 'torchvision'")

    monkeypatch.setattr("common.torchvision_loader.load_torchvision", missing)
    with pytest.raises(DataError, match="torchvision, which downloads MNIST, cannot be imported.*Give"):
        download.download("MNIST", None, "Give a folder.")
