"""MNIST: the real one where it lies beside the repository, and small files in its format."""

import gzip
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import DataError
from data import mnist
from data.mnist import MNIST

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


def images(source) -> torch.Tensor:
    return source.read(np.arange(len(source)), epoch=0)[0]


def test_the_real_one_has_its_published_numbers(prepared, published):
    data = prepared(MNIST, published("MNIST"))
    assert (len(data.train), len(data.valid), len(data.test)) == (55_000, 5_000, 10_000)
    inputs, targets = data.train.read(np.arange(0, 55_000, 5), epoch=0)
    assert inputs.shape == (11_000, 1, 28, 28) and inputs.dtype == torch.float32
    assert abs(float(inputs.mean())) < 0.01 and abs(float(inputs.std()) - 1) < 0.01
    assert torch.equal(data.test.read(np.arange(6), epoch=0)[1], torch.tensor([7, 2, 1, 0, 4, 1]))
    assert torch.bincount(data.valid.read(np.arange(5_000), epoch=0)[1]).tolist()[:2] == [494, 561]


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_images_come_in_the_shape_asked_for_from_the_folder_of_the_files_or_one_above_it(prepared, folder, levels):
    root = [folder, *folder.parents][levels]
    data = prepared(MNIST, root, image_size=32, channels=3)
    assert (len(data.train), len(data.valid), len(data.test)) == (110, 10, 20)
    assert images(data.test).shape == (20, 3, 32, 32)


def test_packed_files_are_read_where_they_lie_and_give_the_same(prepared, folder, tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    for path in folder.iterdir():
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    names = sorted(path.name for path in packed.iterdir())
    assert torch.equal(images(prepared(MNIST, folder).train), images(prepared(MNIST, packed).train))
    assert sorted(path.name for path in packed.iterdir()) == names


@pytest.mark.parametrize("name", [name for pair in FILES.values() for name in pair])
def test_a_missing_file_is_named(prepared, folder, name):
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"holds no {name} and no {name}.gz.*data.root=FOLDER"):
        prepared(MNIST, folder)


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
def test_a_damaged_file_is_an_error_that_says_how(prepared, folder, damage, complaint):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"train-.*{complaint}"):
        prepared(MNIST, folder)


@pytest.mark.parametrize("damage", [lambda packed: b"", lambda packed: packed[:-20], lambda packed: b"PK" + packed])
def test_a_damaged_packed_file_is_named(prepared, folder, damage):
    path = folder / "t10k-labels-idx1-ubyte"
    (folder / f"{path.name}.gz").write_bytes(damage(gzip.compress(path.read_bytes())))
    path.unlink()
    with pytest.raises(DataError, match=f"{path.name}.gz"):
        prepared(MNIST, folder)


def test_a_label_out_of_range_is_named_by_file_and_sample(prepared, folder):
    path = folder / "t10k-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[8 + 7] = 10
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name}: the label of sample 7 is 10"):
        prepared(MNIST, folder)


@pytest.mark.parametrize("root", ["nowhere", "empty"])
def test_a_root_without_the_files_is_an_error_with_the_ways_out(prepared, tmp_path, root):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"data.root=.*{root}.*leave data.root out"):
        prepared(MNIST, tmp_path / root)


def test_what_torchvision_leaves_is_read_and_kept(prepared, monkeypatch, folder):
    downloads = []

    def copy(name, to, way_out):
        downloads.append(name)
        shutil.copytree(folder, to / "MNIST" / "raw")

    monkeypatch.setattr(mnist, "download", copy)
    for _ in range(2):
        assert len(prepared(MNIST).train) == 110
    assert downloads == ["MNIST"]


def test_a_packed_file_is_read_no_further_than_its_header_promises(prepared, folder):
    path = folder / "train-images-idx3-ubyte"
    bomb = path.read_bytes() + bytes(50_000_000)
    (folder / f"{path.name}.gz").write_bytes(gzip.compress(bomb, 1))
    path.unlink()
    with pytest.raises(DataError, match="94,081 values or more after its header"):
        prepared(MNIST, folder)


def test_a_header_that_promises_gigabytes_is_refused(prepared, folder):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(bytes((0, 0, 8, 3)) + struct.pack(">3I", 60_000, 1000, 1000))
    with pytest.raises(DataError, match="60000 x 1000 x 1000 = 60,000,000,000 values, more than"):
        prepared(MNIST, folder)
