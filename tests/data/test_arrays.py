"""Arrays in files: what is held out, what is mapped, and what an error says to type."""

import numpy as np
import pytest
import torch

from common.errors import DataError
from data.arrays import Arrays

X, Y = np.arange(40.0, dtype=np.float32).reshape(20, 2), np.arange(20, dtype=np.uint8)


def rows(source) -> list[int]:
    """The rows of a split, by their targets."""
    return source.read(np.arange(len(source)), 0)[1].tolist()


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "inputs", X)
    np.save(tmp_path / "targets", Y)
    return tmp_path


def test_every_row_is_in_one_split_and_which_are_held_out_depends_on_the_seed_alone(folder, prepared):
    one, same, other = (prepared(Arrays, folder, seed=seed) for seed in (1, 1, 2))
    splits = [rows(source) for source in (one.train, one.valid, one.test)]
    assert [len(split) for split in splits] == [16, 2, 2] and sorted(sum(splits, [])) == Y.tolist()
    assert rows(same.test) == splits[2] != rows(other.test)
    inputs, targets = one.test.read(np.array([1]), 0)
    assert targets.dtype == torch.int64 and inputs.tolist() == X[targets.numpy()].tolist()
    assert "valid 2 (data.valid=0.1)" in one.description


def test_an_array_is_mapped_and_an_archive_of_arrays_gives_the_same(folder, prepared):
    np.savez_compressed(folder / "all.npz", inputs=X, targets=Y)
    mapped, archive = prepared(Arrays, folder), prepared(Arrays, folder / "all.npz")
    assert all(isinstance(array, np.memmap) for array in mapped.train.source.arrays.values())
    assert rows(mapped.train) == rows(archive.train)


@pytest.mark.parametrize("kind", [">f4", ">f8", ">i2", ">i8"])
def test_big_endian_numbers_are_those_of_this_machine(folder, prepared, kind):
    np.save(folder / "big", X.astype(kind))
    one, same = (prepared(Arrays, folder, inputs=name).train.read(np.arange(16), 0)[0] for name in ("big", "inputs"))
    assert one.tolist() == same.tolist()


def test_a_model_may_have_several_inputs(folder, prepared):
    np.save(folder / "more", X[:, :1])
    inputs, targets = prepared(Arrays, folder, inputs=["inputs", "more"]).train.read(np.array([3, 4]), 0)
    assert [tensor.tolist() for tensor in inputs] == [X[targets.numpy()].tolist(), X[targets.numpy(), :1].tolist()]


def test_a_sample_may_have_several_targets(folder, prepared):
    np.save(folder / "more", X[:, :1])
    inputs, targets = prepared(Arrays, folder, targets=["targets", "more"]).train.read(np.array([3, 4]), 0)
    assert targets[0].dtype == torch.int64 and inputs.tolist() == X[targets[0].numpy()].tolist()
    assert targets[1].tolist() == inputs[:, :1].tolist()


def broken(folder):
    (folder / "targets.npy").write_bytes((folder / "targets.npy").read_bytes()[:-5])


def objects(folder):
    np.save(folder / "targets", np.array([{}] * 20), allow_pickle=True)


def narrow(folder):
    for split, width in (("train", 2), ("test", 1)):
        np.savez(folder / f"{split}.npz", inputs=X[:, :width], targets=Y)


MISTAKES = {
    "names": (
        lambda folder: None, {"inputs": "x"}, "holds no array 'x'; it has inputs, targets. Type data.inputs=NAME",
    ),
    "lengths": (lambda folder: np.save(folder / "targets", Y[:9]), {}, "inputs has 20 rows and targets 9"),
    "half a file": (broken, {}, "targets cannot be read"),
    "objects": (objects, {}, "targets cannot be read .*numpy.save"),
    "words": (lambda folder: np.save(folder / "inputs", np.array(["a"] * 20)), {}, "inputs: memmap is not a tensor"),
    "no train": (lambda folder: (folder / "val").mkdir(), {}, "has val and no train"),
    "other rows": (
        narrow, {}, r"test.npz: inputs has rows of float32 \[1\], and .*train.npz of float32 \[2\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_is_there_and_what_to_type(name, folder, prepared):
    mistake, options, message = MISTAKES[name]
    mistake(folder)
    with pytest.raises(DataError, match=message):
        prepared(Arrays, folder, **options)


def test_two_places_for_one_split_are_an_error_that_names_both(folder, prepared):
    for name in ("train", "val", "valid"):
        (folder / name).mkdir()
    with pytest.raises(DataError, match="has val and valid for one split; keep one"):
        prepared(Arrays, folder)
