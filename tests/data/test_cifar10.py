"""CIFAR-10, on small files in its format; what is not the published one is never unpickled."""

import hashlib
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import DataError
from data import cifar10
from data.cifar10 import CIFAR10

NAMES = [*cifar10._FILES["train"], *cifar10._FILES["test"]]


class Harmful:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write(folder: Path) -> None:
    """Six files of 20 images."""
    random = np.random.default_rng(0)
    for name in NAMES:
        batch = {"data": random.integers(0, 256, (20, 3072), dtype=np.uint8), "labels": [i % 10 for i in range(20)]}
        (folder / name).write_bytes(pickle.dumps(batch))


@pytest.fixture
def folder(tmp_path) -> Path:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    write(folder)
    return folder


@pytest.fixture
def known(folder, monkeypatch) -> Path:
    """The same, taken for the published files."""
    md5 = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in NAMES}
    monkeypatch.setattr(
        cifar10, "_FILES", {split: {name: md5[name] for name in files} for split, files in cifar10._FILES.items()}
    )
    return folder


def test_the_root_may_be_the_published_folder_or_the_one_that_holds_it(prepared, known):
    for root in (known, known.parent):
        data = prepared(CIFAR10, root, image_size=28, channels=1)
        assert (len(data.train), len(data.valid), len(data.test)) == (90, 10, 20)
        assert data.train.read(np.arange(4), epoch=0)[0].shape == (4, 1, 28, 28)


def test_images_are_red_green_and_blue_planes_normalised(prepared, known):
    inputs, targets = prepared(CIFAR10, known).test.read(np.array([3]), epoch=0)
    pixels = pickle.loads((known / "test_batch").read_bytes())["data"][3].reshape(3, 32, 32)
    expected = (pixels / 255 - np.reshape([0.4914, 0.4822, 0.4465], (3, 1, 1))) / np.reshape(
        [0.2470, 0.2435, 0.2616], (3, 1, 1)
    )
    assert np.allclose(inputs[0].numpy(), expected, atol=1e-5) and targets.tolist() == [3]


def test_only_training_images_are_augmented(prepared, known):
    augmented, plain = prepared(CIFAR10, known), prepared(CIFAR10, known, augment=False)
    for split, n, same in (("train", 90, False), ("valid", 10, True), ("test", 20, True)):
        pair = [getattr(data, split).read(np.arange(n), epoch=1)[0] for data in (augmented, plain)]
        assert torch.equal(*pair) is same
    reseeded = prepared(CIFAR10, known, seed=1).train.read(np.arange(90), epoch=1)[0]
    assert not torch.equal(reseeded, augmented.train.read(np.arange(90), epoch=1)[0])


def test_files_that_are_not_the_published_ones_are_refused_and_not_unpickled(prepared, folder, tmp_path):
    (folder / "data_batch_1").write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    with pytest.raises(DataError, match=r"data_batch_1 \(\d+ bytes, MD5 .* is damaged or another file"):
        prepared(CIFAR10, folder)
    assert not (tmp_path / "harm").exists()


def test_a_missing_file_is_named_with_the_ways_out(prepared, known):
    (known / "data_batch_5").unlink()
    with pytest.raises(DataError, match="data_batch_5: No such file.*data.root=FOLDER, or leave out data.root"):
        prepared(CIFAR10, known)
