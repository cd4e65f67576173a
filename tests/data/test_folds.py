"""Cross-validation: each sample validates once, in folds of the sizes of scikit-learn's KFold."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from file_formats import idx
from sklearn.model_selection import KFold

from common.errors import DataError
from data.arrays import Arrays
from data.digits import Digits
from data.folds import Folded
from data.image_folder import ImageFolder
from data.images import Images
from data.jsonl import Jsonl
from data.loader import TrainBatches
from data.mnist import MNIST
from data.random_regression import RandomRegression
from data.tensors import TensorData

FOLDS = 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """103 rows as arrays and as JSON lines, 43 images of two classes, and 65 of ten."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("folds")
    np.save(folder / "inputs.npy", np.arange(103, dtype=np.float32)[:, None])
    np.save(folder / "targets.npy", np.arange(103))
    (folder / "x.jsonl").write_text("".join(json.dumps({"text": "a " * (i % 9) + f"{i}"}) + "\n" for i in range(103)))
    for i in range(43):
        path = folder / "images" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (i, i, i)).save(path)
    for name, count in (("train", 65), ("t10k", 9)):
        numbers = np.arange(count, dtype="u1")
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(np.tile(numbers[:, None, None], (1, 4, 4))))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(numbers % 10))
    return folder


KINDS = {
    "arrays": lambda root: partial(Arrays, str(root)),
    "tensors": lambda root: partial(TensorData, torch.arange(103.0)[:, None], torch.arange(103)),
    "digits": lambda root: partial(Digits, image_size=8),
    "mnist": lambda root: partial(MNIST, str(root), image_size=4),
    "image_folder": lambda root: partial(ImageFolder, str(root / "images"), image_size=4),
    "jsonl": lambda root: partial(Jsonl, root=str(root / "x.jsonl"), seq_len=16, cache_dir=str(root)),
    "buckets": lambda root: partial(
        Jsonl, root=str(root / "x.jsonl"), seq_len=16, cache_dir=str(root), bucket_by_length=True
    ),
}


def prepared(make, **folds):
    data = make(**folds)
    data.prepare()
    return data


def samples(source):
    inputs, targets = source.read(np.arange(len(source)), 0)
    return sorted(f"{x.tolist()} {y.tolist()}" for x, y in zip(inputs, targets, strict=True))


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow) if k == "digits" else k for k in KINDS])
def test_each_sample_outside_of_the_test_split_validates_once_and_trains_in_all_other_folds(kind, root):
    make = KINDS[kind](root)
    whole = prepared(make)
    everything = sorted([*samples(whole.train), *samples(whole.valid)])
    sizes, validated = [], []
    for fold in range(FOLDS):
        data = prepared(make, folds=FOLDS, fold=fold)
        sizes.append((len(data.train), len(data.valid)))
        assert sorted([*samples(data.train), *samples(data.valid)]) == everything
        assert samples(data.test) == samples(whole.test)
        assert f"fold {fold} of {FOLDS}" in data.description
        validated += samples(data.valid)
    assert sorted(validated) == everything
    assert sizes == [(len(train), len(valid)) for train, valid in KFold(FOLDS).split(everything)]


def test_own_validation_files_are_left_out(root, tmp_path):
    for split, rows in (("train", range(20)), ("valid", range(100, 105))):
        (tmp_path / split).mkdir()
        np.save(tmp_path / split / "inputs.npy", np.array(rows, np.float32)[:, None])
        np.save(tmp_path / split / "targets.npy", np.array(rows))
    data = prepared(partial(Arrays, str(tmp_path), test=0.0), folds=4, fold=3)
    found = [targets for source in (data.train, data.valid) for targets in source.read(np.arange(len(source)), 0)[1]]
    assert sorted(map(int, found)) == list(range(20)) and len(data.valid) == 5


def test_rows_of_tensors_are_named_and_buckets_stay(root):
    data = TensorData(torch.arange(50.0)[:, None], torch.arange(50), folds=FOLDS, fold=2)
    assert data.valid.targets.tolist() == data.rows["valid"].tolist() and len(data.rows["train"]) == 36
    rows = prepared(KINDS["buckets"](root), folds=FOLDS, fold=0)
    batches = TrainBatches(rows.train, 4, seed=1)
    widths = {batches[step].inputs.shape[1] for step in range(1, 19)}
    assert max(widths) == 16 and len(widths) > 1


class Flipped(Folded):
    """Images that training turns upside down."""

    image_shape, num_classes, mean, std = (1, 2, 2), 2, (0.0,), (1.0,)

    def prepare(self):
        pixels = np.arange(40, dtype=np.uint8).reshape(10, 1, 2, 2)
        self.train, self.valid, self.test = Images(pixels, np.arange(10) % 2, self, "made up"), None, None
        self.train.augment = lambda images, indices, epoch: images[:, :, ::-1].copy()
        self.description = "made up"
        self.deal()


def test_images_that_train_are_augmented_and_those_that_validate_or_are_predicted_are_not():
    data = prepared(Flipped, folds=2, fold=0)
    top_is_larger = [source.read(np.arange(5), 0)[0][:, 0, 0, 0] > source.read(np.arange(5), 0)[0][:, 0, 1, 0]
                     for source in (data.train, data.valid, data.source_of("train"))]  # fmt: skip
    assert top_is_larger[0].all() and not top_is_larger[1].any() and not top_is_larger[2].any()
    assert len(data.source_of("train")) == len(data.train) == 5


WRONG = [
    ({"folds": 5, "fold": 5}, "data.folds=5 data.fold=5: data.folds is 2 or more, and data.fold"),
    ({"folds": 5, "fold": -1}, "data.folds=5 data.fold=-1: "),
    ({"folds": 5}, "data.folds=5 data.fold=None: "),
    ({"fold": 0}, "data.folds=None data.fold=0: "),
    ({"folds": 1, "fold": 0}, "data.folds=1 data.fold=0: "),
    ({"folds": 90, "fold": 0}, "data.folds=90 must be at most the number of training samples, 80"),
]


@pytest.mark.parametrize("folds, said", WRONG)
def test_a_fold_that_does_not_exist_is_refused_with_the_numbers(folds, said):
    with pytest.raises(DataError) as error:
        prepared(partial(RandomRegression, samples=80), **folds)
    assert said in str(error.value)


def test_packed_rows_have_the_documents_of_their_folds_and_ids_are_those_of_the_whole_data(root):
    packed = partial(KINDS["jsonl"](root), packing="whole")
    rows = [prepared(KINDS["jsonl"](root), folds=FOLDS, fold=fold) for fold in (0, 1)]
    for fold, plain in enumerate(rows):
        data = prepared(packed, folds=FOLDS, fold=fold)
        counts = [(source.read(np.arange(len(source)), 0)[1] != -100).sum() for source in (data.valid, plain.valid)]
        assert len(data.valid) < len(plain.valid) and counts[0] == counts[1]
    arrays = prepared(KINDS["arrays"](root), folds=FOLDS, fold=2)
    assert arrays.valid.ids(np.arange(5)) == arrays.valid.read(np.arange(5), 0)[1].tolist()
