"""MNIST: the real one where it lies beside the repository, and small files in its format."""

import gzip
import shutil
import socket
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import DataError
from data import download
from data.mnist import MNIST

REAL = Path(__file__).parents[2].parent / "shared" / "data"
FILES = {split: (f"{split}-images-idx3-ubyte", f"{split}-labels-idx1-ubyte") for split in ("train", "t10k")}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def folder(tmp_path) -> Path:
    """MNIST's four files, with 120 and 20 images."""
    random = np.random.default_rng(0)
    raw = tmp_path / "files" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for (images, labels), n in zip(FILES.values(), (120, 20), strict=True):
        (raw / images).write_bytes(idx(random.integers(0, 256, (n, 28, 28), dtype=np.uint8)))
        (raw / labels).write_bytes(idx(np.arange(n, dtype=np.uint8) % 10))
    return raw


def prepared(root, **settings) -> MNIST:
    data = MNIST(root=str(root), **settings)
    data.prepare()
    return data


@pytest.mark.skipif(not (REAL / "MNIST").is_dir(), reason="no MNIST in ../shared/data")
def test_the_real_one_has_its_published_numbers():
    data = prepared(REAL)
    assert (len(data.train), len(data.valid), len(data.test)) == (55_000, 5_000, 10_000)
    inputs, targets = data.train.read(np.arange(0, 55_000, 5), epoch=0)
    assert inputs.shape == (11_000, 1, 28, 28) and inputs.dtype == torch.float32
    assert abs(float(inputs.mean())) < 0.01 and abs(float(inputs.std()) - 1) < 0.01
    assert torch.equal(data.test.read(np.arange(6), epoch=0)[1], torch.tensor([7, 2, 1, 0, 4, 1]))
    assert torch.bincount(data.valid.read(np.arange(5_000), epoch=0)[1]).tolist()[:2] == [494, 561]


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_the_root_may_be_the_folder_of_the_files_or_one_above_it(folder, levels):
    root = [folder, *folder.parents][levels]
    data = prepared(root)
    assert (len(data.train), len(data.valid), len(data.test)) == (110, 10, 20)


def test_packed_files_are_read_where_they_lie_and_give_the_same(folder, tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    for path in folder.iterdir():
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    names = sorted(path.name for path in packed.iterdir())
    plain, same = prepared(folder), prepared(packed)
    assert torch.equal(plain.train.read(np.arange(110), 0)[0], same.train.read(np.arange(110), 0)[0])
    assert sorted(path.name for path in packed.iterdir()) == names


def test_images_come_in_the_size_and_channels_asked_for(folder):
    inputs, _ = prepared(folder, image_size=32, channels=3).test.read(np.arange(4), epoch=0)
    assert inputs.shape == (4, 3, 32, 32)


@pytest.mark.parametrize("name", [name for pair in FILES.values() for name in pair])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"holds no {name} and no {name}.gz.*data.root=FOLDER"):
        prepared(folder)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda content: b"", "is no idx file.* has 0 bytes and begins with nothing"),
        (lambda content: content[:9], "is no idx file"),
        (lambda content: content[:-1], r"94,079 values .* 120 x 28 x 28 = 94,080: it is cut short"),
        (lambda content: content + b"x", "94,081 values"),
        (lambda content: b"\x00\x00\x0d\x03" + content[4:], "begins with 00000d03 instead of 00000803"),
        (lambda content: idx(np.zeros((0, 28, 28), np.uint8)), "0 images and 120 labels"),
    ],
    ids=["empty", "header cut", "cut", "too long", "foreign", "no images"],
)
def test_a_damaged_file_is_an_error_that_says_how(folder, damage, complaint):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"train-.*{complaint}"):
        prepared(folder)


@pytest.mark.parametrize("damage", [lambda packed: b"", lambda packed: packed[:-20], lambda packed: b"PK" + packed])
def test_a_damaged_packed_file_is_named(folder, damage):
    path = folder / "t10k-labels-idx1-ubyte"
    (folder / f"{path.name}.gz").write_bytes(damage(gzip.compress(path.read_bytes())))
    path.unlink()
    with pytest.raises(DataError, match=f"{path.name}.gz"):
        prepared(folder)


def test_a_label_out_of_range_is_named_by_file_and_sample(folder):
    path = folder / "t10k-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[8 + 7] = 10
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name}: the label of sample 7 is 10"):
        prepared(folder)


@pytest.mark.parametrize("root", ["nowhere", "empty"])
def test_a_root_without_the_files_is_an_error_with_the_ways_out(tmp_path, root):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"data.root=.*{root}.*leave data.root out"):
        prepared(tmp_path / root)


class TestDownload:
    @pytest.fixture(autouse=True)
    def no_proxy_of_this_machine(self, monkeypatch):
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)

    def fails(self, tmp_path) -> str:
        start = time.monotonic()
        with pytest.raises(DataError) as raised:
            MNIST(cache_dir=str(tmp_path / "cache")).prepare()
        assert time.monotonic() - start < 8
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [".mnist.lock"]
        return str(raised.value)

    def test_offline_is_an_error_at_once_with_both_ways_out(self, tmp_path, monkeypatch):
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        message = self.fails(tmp_path)
        assert "no server that has it can be reached" in message
        assert "data.root=FOLDER" in message and "with a network" in message

    def test_a_network_that_never_answers_is_an_error_too(self, tmp_path, monkeypatch):
        monkeypatch.setattr(download, "_REACH_S", 0.5)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"http://127.0.0.1:{silent.getsockname()[1]}"
            monkeypatch.setenv("https_proxy", address)
            monkeypatch.setenv("http_proxy", address)
            assert "no server that has it can be reached" in self.fails(tmp_path)

    def test_a_download_that_breaks_off_leaves_nothing(self, tmp_path, monkeypatch):
        def breaks_off(folder, download):
            (folder / "half").write_text("half")
            raise RuntimeError("Error downloading\n  train-images")

        monkeypatch.setattr(download, "_torchvision", lambda name, ways_out: breaks_off)
        monkeypatch.setattr(download, "reachable", lambda urls: True)
        breaks_off.mirrors = ["http://somewhere"]
        before = socket.getdefaulttimeout()
        message = self.fails(tmp_path)
        assert "failed (RuntimeError: Error downloading train-images). Give" in message
        assert socket.getdefaulttimeout() == before

    def test_what_torchvision_leaves_is_read_and_kept(self, tmp_path, monkeypatch, folder):
        downloads = []

        def whole(to, download):
            downloads.append(to)
            shutil.copytree(folder, to / "MNIST" / "raw")

        whole.mirrors = ["http://somewhere"]
        monkeypatch.setattr(download, "_torchvision", lambda name, ways_out: whole)
        monkeypatch.setattr(download, "reachable", lambda urls: True)
        for _ in range(2):
            data = MNIST(cache_dir=str(tmp_path / "cache"))
            data.prepare()
            assert len(data.train) == 110
        assert len(downloads) == 1
