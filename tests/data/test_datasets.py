"""Every data set alike: what it gives, how it is split, what it refuses, and that a started process reads the same."""

import json
import pickle
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from common.errors import DataError
from data.arrays import Arrays
from data.cifar10 import CIFAR10
from data.dataset import DataSet
from data.digits import Digits
from data.image_folder import ImageFolder
from data.jsonl import Jsonl
from data.mnist import MNIST
from data.parquet import Parquet
from data.random_images import RandomImages
from data.random_regression import RandomRegression
from data.text import Text
from data.tokens import Tokens


@dataclass
class Case:
    """A data set of few samples.

    Attributes:
        kind: Its class.
        sizes: Of train, valid and test; 0 where there is no such split.
        shapes: Of one sample's inputs and of its targets.
        options: Those of its constructor besides ``root``.
        root: What ``root`` names, by name: a file or folder that ``made`` writes; None for data that is nowhere.
        refused: Values out of range, by key.
        bytes: What a started process may be sent at most; None for what is held in memory.
    """

    kind: type[DataSet]
    sizes: tuple[int, int, int]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    root: str | None = None
    refused: dict[str, list[Any]] = field(default_factory=dict)
    bytes: int | None = None


LANGUAGE = {"seq_len": [0], "num_workers": [-1]}
CASES = {
    "text": Case(
        Text, (450, 25, 24), ((8,), (8,)), {"seq_len": 8}, "text",
        {**LANGUAGE, "min_frequency": [3]}, 3000,
    ),
    "words": Case(
        Text, (337, 18, 18), ((8,), (8,)), {"seq_len": 8, "vocabulary": "words"}, "text",
        {"min_frequency": [0], "max_vocabulary": [1]}, 3000,
    ),
    "columns": Case(
        Text, (335, 18, 18), ((8,), (8,)), {"seq_len": 8, "vocabulary": "words", "batchify": True, "columns": 5},
        "text", {"columns": [None]}, 3000,
    ),
    "jsonl": Case(
        Jsonl, (54, 3, 3), ((8,), (8,)), {"seq_len": 8}, "rows.jsonl",
        {**LANGUAGE, "field": ["", []]}, 3000,
    ),
    "rows in buckets": Case(
        Jsonl, (54, 3, 3), ((8,), (8,)), {"seq_len": 8, "bucket_by_length": True}, "rows.jsonl", bytes=3000,
    ),
    "parquet": Case(
        Parquet, (54, 3, 3), ((8,), (8,)), {"seq_len": 8}, "rows.parquet",
        {**LANGUAGE, "column": ["", []]}, 3000,
    ),
    "tokens": Case(
        Tokens, (44, 2, 2), ((20,), (20,)), {"seq_len": 20, "format": "nanogpt"}, "tokens",
        {**LANGUAGE, "vocab_size": [0]}, 3000,
    ),
    "image_folder": Case(
        ImageFolder, (36, 2, 2), ((3, 8, 8), ()), {"image_size": 8}, "images",
        {"image_size": [0], "num_workers": [-1], "mean": [[0.5]], "std": [[1.0, 1.0, 0.0]]}, 3000,
    ),
    "arrays": Case(
        Arrays, (49, 6, 5), ((3,), (2,)), {"inputs": "x", "targets": "y", "test": 0.09}, "arrays",
        {"valid": [-0.1], "test": [0.9], "num_workers": [-1]}, 3000,
    ),
    "arrays with a split of their own": Case(
        Arrays, (54, 6, 60), ((3,), (2,)), {"inputs": "x", "targets": "y"}, "split arrays", bytes=3000,
    ),
    "mnist": Case(
        MNIST, (110, 10, 20), ((1, 28, 28), ()), root="files", refused={"image_size": [0], "channels": [0]},
    ),
    "digits": Case(Digits, (1439, 179, 179), ((3, 8, 8), ()), {"image_size": 8, "channels": 3}),
    "random_images": Case(
        RandomImages, (50, 5, 5), ((3, 16, 16), ()), {"samples": 50, "image_size": 16},
        refused={"samples": [0], "image_size": [0], "channels": [0], "num_classes": [0], "seed": [-1]},
    ),
    "random_regression": Case(
        RandomRegression, (50, 5, 5), ((3,), (2,)), {"samples": 50, "in_features": 3, "out_features": 2},
        refused={"samples": [0], "in_features": [0], "noise": [-1.0], "seed": [-1]},
    ),
}  # fmt: skip


@pytest.fixture
def made(prepared, tmp_path, mnist_files):
    """``made(case)``: that data set, prepared."""
    (tmp_path / "text").write_text("one two three\n" * 1000)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(60)))
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(60)]}), tmp_path / "rows.parquet")
    np.arange(1000, dtype="<u2").tofile(tmp_path / "tokens")
    numbers = {"x": np.random.default_rng(0).normal(size=(60, 3)), "y": np.arange(120.0).reshape(60, 2)}
    for folder in ("arrays", "split arrays/train"):
        (tmp_path / folder).mkdir(parents=True)
        for name, array in numbers.items():
            np.save(tmp_path / folder / name, array)
    np.savez(tmp_path / "split arrays" / "test.npz", **numbers)
    for i in range(40):
        path = tmp_path / "images" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 8 + i), i, np.uint8)).save(path)
    return lambda case: prepared(case.kind, tmp_path / case.root if case.root else None, **case.options)


def everything(source) -> tuple[torch.Tensor, torch.Tensor]:
    return source.read(np.arange(len(source)), epoch=0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_data_set_gives_its_splits_as_batches_of_samples_and_says_how_large_they_are(made, case):
    data = made(case)
    splits = [data.train, data.valid, data.test]
    assert tuple(len(split) if split else 0 for split in splits) == case.sizes
    inputs, targets = data.train.read(np.array([4, 1, 4]), epoch=0)
    assert (inputs.shape[1:], targets.shape[1:]) == case.shapes and len(inputs) == len(targets) == 3
    assert torch.equal(inputs[0], inputs[2]) and torch.equal(targets[0], targets[2])
    assert all(f"{size:,}" in data.description for size in case.sizes)
    data.prepare()
    assert [data.train, data.valid, data.test] == splits, "the second time nothing is done"
    language = data.vocabulary is not None
    assert (data.vocab_size is not None, data.seq_len is not None) == (language, language)


@pytest.mark.parametrize("name", ["random_images", "random_regression"])
def test_another_seed_gives_other_samples(prepared, name):
    one, other = (prepared(CASES[name].kind, **CASES[name].options, seed=seed) for seed in (1, 2))
    assert not torch.equal(everything(one.train)[0], everything(other.train)[0])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_started_process_and_another_epoch_read_the_same(made, case):
    data = made(case)
    sent = pickle.dumps(data.train)
    assert case.bytes is None or len(sent) < case.bytes, "the path and not the data"
    for source, epoch in ((pickle.loads(sent), 0), (data.train, 7), (made(case).train, 0)):
        read = source.read(np.arange(len(source)), epoch)
        assert all(map(torch.equal, read, everything(data.train)))


REFUSED = [(case, key, value) for case in CASES.values() for key, values in case.refused.items() for value in values]


@pytest.mark.parametrize("case, key, value", REFUSED, ids=lambda value: getattr(value, "kind", value))
def test_a_value_out_of_range_is_an_error_that_names_the_key(case, key, value):
    root = {"root": "somewhere"} if case.root else {}
    named = f"data.{key}=" if value is not None and key != "columns" else f"data.{key}"
    with pytest.raises(DataError, match=re.escape(named)):
        case.kind(**root, **{**case.options, key: value})


@pytest.mark.parametrize("kind", [Text, Jsonl, Parquet, Tokens])
def test_what_reads_files_of_the_users_own_asks_for_them(kind, tmp_path, prepared):
    with pytest.raises(DataError, match="data.root=FILE_OR_FOLDER"):
        kind()
    with pytest.raises(DataError, match=f"data.root={tmp_path}/nowhere does not exist"):
        prepared(kind, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"data.root={tmp_path}/empty holds no"):
        prepared(kind, tmp_path / "empty")


def test_classes_have_names_or_none_so_that_a_folder_of_any_names_may_go_on():
    assert Digits(num_classes=3).class_names() == []
    assert CIFAR10(num_classes=3).class_names() == ["airplane", "automobile", "bird"]
