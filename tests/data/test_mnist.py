"""MNIST: the real one where it lies beside the repository, and small files in its format."""

import gzip
import re

import numpy as np
import pytest
import torch

from common.errors import DataError
from data.mnist import MNIST

IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


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
def test_images_come_in_the_shape_asked_for_from_the_folder_of_the_files_or_one_above_it(prepared, mnist_files, levels):
    root = [mnist_files, *mnist_files.parents][levels]
    data = prepared(MNIST, root, image_size=32, channels=3)
    assert (len(data.train), len(data.valid), len(data.test)) == (110, 10, 20)
    assert images(data.test).shape == (20, 3, 32, 32)


def test_packed_files_are_read_where_they_lie_and_give_the_same(prepared, mnist_files, tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    for path in mnist_files.iterdir():
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert torch.equal(images(prepared(MNIST, mnist_files).train), images(prepared(MNIST, packed).train))


DAMAGES = {
    "no file": (IMAGES, None, ", raw/train-images-idx3-ubyte.gz, MNIST/raw/train-images-idx3-ubyte, "),
    "cut": (IMAGES, lambda content: content[:-1], "94,079 values after its header, which has 120 x 28 x 28 = 94,080"),
    "foreign": (IMAGES, lambda content: b"\0\0\x0d\x03" + content[4:], "begins with 00000d03 instead of 00000803"),
    "packed and no gzip": (f"{LABELS}.gz", lambda content: b"PK" + content, "Not a gzipped file"),
    "packed and cut": (f"{LABELS}.gz", lambda content: gzip.compress(content)[:-9], "is damaged or cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_file_is_an_error_that_says_how(prepared, mnist_files, case):
    name, damage, complaint = DAMAGES[case]
    path = mnist_files / name.removesuffix(".gz")
    content = path.read_bytes()
    path.unlink()
    if damage is not None:
        (mnist_files / name).write_bytes(damage(content))
    with pytest.raises(DataError, match=f"{path.name}.*{re.escape(complaint)}"):
        prepared(MNIST, mnist_files)


@pytest.mark.parametrize("root", ["nowhere", "empty"])
def test_a_root_without_the_files_is_an_error_with_the_ways_out(prepared, tmp_path, root):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"data.root=.*{root}.*leave out data.root"):
        prepared(MNIST, tmp_path / root)
