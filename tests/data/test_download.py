"""Downloads: what is kept of them, and what is said, within seconds, where they fail."""

import importlib.machinery
import shutil
import socket
import sys
import time
import types
import urllib.request

import pytest
from interpreters import python

from common.errors import DataError
from data import cache as cache_module
from data import cifar10, images
from data.cifar10 import CIFAR10
from data.mnist import MNIST
from data.vocabulary import gpt2
from data.wikitext2 import WikiText2


@pytest.fixture
def by(monkeypatch):
    """Has torchvision download by a function of the test's own."""

    def install(function):
        names = dict.fromkeys(("MNIST", "CIFAR10"), function)
        torchvision = types.SimpleNamespace(datasets=types.SimpleNamespace(**names))
        monkeypatch.setattr(images, "load_torchvision", lambda: torchvision)

    return install


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
    monkeypatch.setattr(cache_module, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        # Not urlopen, which keeps the proxies of its first call in this process.
        by(lambda folder, download: urllib.request.build_opener().open(url))
        fails(MNIST, "downloading MNIST failed (TimeoutError: timed out)")


def test_a_download_that_breaks_off_leaves_nothing(by, fails):
    def break_off(folder, download):
        (folder / "half").write_text("half")
        raise RuntimeError("Error downloading\n  train-images")

    by(break_off)
    fails(MNIST, "failed (RuntimeError: Error downloading train-images). Give")


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

    monkeypatch.setattr(images, "load_torchvision", missing)
    fails(MNIST, "No module named 'torchvision'")


def test_wikitext2_needs_datasets(fails, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fails(WikiText2, "`datasets` is not installed", "pip install datasets")


@pytest.fixture
def hugging_face(monkeypatch):
    """Has a package ``datasets`` load by a function of the test's own."""

    def install(load_dataset) -> None:
        module = types.ModuleType("datasets")
        module.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
        module.load_dataset = load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)

    return install


def test_a_download_of_wikitext2_that_fails_is_an_error(fails, hugging_face):
    def no_route(*_):
        raise ConnectionError("no route to host")

    hugging_face(no_route)
    fails(WikiText2, "no route to host", "pip install datasets")


def test_a_downloaded_wikitext2_becomes_the_published_files(prepared, cache, hugging_face):
    lines = ["", " = Title = \n", "", " A line of text . \n"]
    hugging_face(lambda *_: dict.fromkeys(("train", "validation", "test"), {"text": lines}))
    data = prepared(WikiText2, seq_len=4)
    published = " \n = Title = \n \n A line of text . \n"
    assert (cache / "wikitext-2-v1" / "valid.txt").read_text() == published
    assert len(data.valid) == len(gpt2().encode_ordinary(published)) // 4


def test_a_torchvision_that_does_not_fit_torch_is_said_once_with_what_to_install(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import sys\n"
        "if 'tried' not in sys.argv:\n"
        "    sys.argv.append('tried')\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "__version__ = '0.1.2'\n"
    )
    twice = "from common.packages import load_torchvision as load; load(); load()"
    run = python("-c", twice, PYTHONPATH=str(tmp_path))
    assert run.stderr.count("torchvision 0.1.2 does not fit torch") == 1
    assert "Install both from one index: https://download.pytorch.org/whl/" in run.stderr


@pytest.mark.slow  # importing torchvision takes seconds
@pytest.mark.parametrize("kind", [MNIST, CIFAR10])
def test_torchvision_has_the_data_set_and_the_published_files(kind):
    known = getattr(images.load_torchvision().datasets, kind.__name__)
    assert getattr(known, "mirrors", None) or known.url
    if kind is CIFAR10:
        assert cifar10._FILES == {"train": dict(known.train_list), "test": dict(known.test_list)}
        assert known.base_folder == cifar10._FOLDER
