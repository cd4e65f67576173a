"""A mixture: which samples are in a batch, beside an order that is worked out sample by sample."""

from collections import Counter
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import DataError
from data.dataset import InMemory
from data.image_folder import ImageFolder
from data.loader import EvalBatches, TrainBatches, permute
from data.mixture import Mixture
from data.tensors import TensorData

SIZES = {"a": 50, "b": 3, "c": 11}  # b is smaller than a batch
THOUSANDS = {"a": 0, "b": 1000, "c": 2000}


def samples(name, count):
    numbers = torch.arange(count) + THOUSANDS[name]
    return TensorData(numbers[:, None].float(), numbers, valid=(numbers[:2, None].float(), numbers[:2]), test=0)


def mixture(weights, seed=5, sizes=SIZES):
    mixed = Mixture({name: (samples(name, sizes[name]), weight) for name, weight in weights.items()}, seed)
    mixed.prepare()
    return mixed


def worked_out(weights, count, seed=5):
    """The numbers of the first samples, one by one: of the part that lags most behind its share."""
    names, given, numbers = list(weights), Counter(), []
    whole = sum(Fraction(str(weight)) for weight in weights.values())
    for place in range(1, count + 1):
        lags = [Fraction(str(weights[name])) / whole * place - given[name] for name in names]
        part = lags.index(max(lags))
        name = names[part]
        epoch, row = divmod(given[name], SIZES[name])
        shuffled = permute(np.arange(SIZES[name]), SIZES[name], (seed, part, epoch))
        numbers.append(THOUSANDS[name] + int(samples(name, SIZES[name]).train.targets[shuffled[row]]) % 1000)
        given[name] += 1
    return numbers


@pytest.mark.parametrize("size", [1, 7, 8])
@pytest.mark.parametrize(
    "weights", [{"a": 3, "b": 0.1, "c": 1}, {"a": 1, "b": 1}, {"c": 2.5}, {"a": 1, "b": 1e-3, "c": 1}], ids=str
)
def test_each_sample_is_of_the_part_that_lags_most(weights, size):
    batches = TrainBatches(mixture(weights).train, size, seed=9)
    read = [batches[step].targets.tolist() for step in range(1, 120 // size + 1)]
    expected = worked_out(weights, len(read) * size)
    assert [sorted(batch) for batch in read] == [
        sorted(expected[first : first + size]) for first in range(0, len(expected), size)
    ]


def test_each_stretch_has_exactly_the_weights():
    read = mixture({"a": 3, "b": 0.1, "c": 0.9}).train.read(np.arange(400), 0)[1].numpy() // 1000
    for stretch in read.reshape(10, 40):
        assert [int((stretch == part).sum()) for part in range(3)] == [30, 1, 9]
    shares = np.cumsum(np.eye(3)[read], axis=0) - np.arange(1, 401)[:, None] * [0.75, 0.025, 0.225]
    assert np.abs(shares).max() < 1


def test_weights_of_many_digits_are_rounded_and_no_part_is_lost():
    mixed = mixture({"a": 1.23456789e12, "b": 1, "c": 9.87654321e11})
    read = mixed.train.read(np.arange(20_001), 0)[1].numpy() // 1000
    shares = np.bincount(read) / len(read)
    assert shares == pytest.approx([0.5555556, 0.00005, 0.4444444], abs=1e-4) and (read == 1).any()


def test_replicas_and_a_new_size_of_the_batch_take_the_same_samples():
    source = mixture({"a": 3, "b": 1, "c": 1}).train
    whole = TrainBatches(source, 12, seed=9)
    for step in range(1, 20):
        shares = [TrainBatches(source, 12, 9, rank, 4)[step].targets for rank in range(4)]
        assert torch.equal(torch.cat(shares), whole[step].targets)
    later = TrainBatches(source, 6, seed=9, earlier=[(5, 12)])
    for step in range(6, 20):
        two = [later[2 * step - 6].targets, later[2 * step - 5].targets]
        assert sorted(torch.cat(two).tolist()) == sorted(whole[step].targets.tolist())
    assert (whole.steps_per_epoch, whole.steps_until(2.5)) == (5, 13)  # 64 samples
    assert later.steps_until(1) == 5  # the first five steps have used 60 of them


def test_evaluations_take_one_part_after_the_other():
    batches = EvalBatches(mixture({"a": 3, "b": 1}).valid, 4, limit=1)
    read = [(batch.targets.tolist(), batch.weights.tolist()) for batch in batches]
    assert read == [([0, 1, 0, 0], [1, 1, 0, 0]), ([1000, 1001, 1000, 1000], [1, 1, 0, 0])]
    assert batches.counts == {"a": 1, "b": 1} and len(batches) == batches.whole == 2
    joined = mixture({"a": 3, "b": 1}).valid
    assert joined.read(np.array([3, 0, 2]), 0)[1].tolist() == [1001, 0, 1000] and len(joined) == 4
    assert joined.ids(np.array([3, 0, 2])) == ["b/1", "a/0", "b/0"]
    whole = mixture({"a": 3, "b": 1}).source_of("train")
    assert whole.read(np.arange(53), 0)[1].tolist() == [
        number for name in "ab" for number in samples(name, SIZES[name]).train.targets.tolist()
    ]


def test_parts_have_epochs_and_augmentation_of_their_own():
    from data.random_images import RandomImages

    class Numbered(RandomImages):
        def prepare(self):
            super().prepare()
            read = self.train.read
            self.train.read = lambda indices, epoch: (read(indices, epoch)[0], torch.from_numpy(indices * 0 + epoch))

    sizes = {"image_size": 8, "num_classes": 3}
    mixed = Mixture({"small": Numbered(2, **sizes), "large": Numbered(8, **sizes)})
    mixed.prepare()
    images, epochs = mixed.train.read(np.arange(16), 0)
    assert epochs.tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 2, 0, 2, 0, 3, 0, 3, 0] and images.shape == (16, 3, 8, 8)


def test_a_part_without_samples_is_an_error_that_names_it():
    empty = TensorData(torch.ones(2, 1), torch.ones(2), 0, 0)
    empty.train = InMemory(torch.ones(0, 1), torch.ones(0))
    with pytest.raises(DataError, match=r"data\.parts\.none: there is no sample to train on"):
        Mixture({"some": TensorData(torch.ones(2, 1), torch.ones(2)), "none": empty}).prepare()


@pytest.mark.parametrize("first, second, differs", [
    (["bird", "cat"], ["cat"], "class 0 is 'cat' in data.parts.b and 'bird' in data.parts.a"),
    (["cat"], ["bird", "cat"], "class 0 is 'cat' in data.parts.a and 'bird' in data.parts.b"),
    (["cat"], ["cat", "dog"], None),
])  # fmt: skip
def test_a_class_has_the_same_number_in_all_parts(tmp_path, first, second, differs):
    for folder in [*(tmp_path / "a" / name for name in first), *(tmp_path / "b" / name for name in second)]:
        folder.mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(folder / "1.png")
    mixed = Mixture({name: ImageFolder(str(tmp_path / name), 4) for name in "ab"})
    with pytest.raises(DataError, match=differs) if differs else nullcontext():
        mixed.prepare()


def test_parts_are_all_pairs_or_none_is():
    parts = {name: samples(name, SIZES[name]) for name in "ab"}
    parts["a"].pairs = True
    assert Mixture(parts).pairs and not mixture({"a": 1}).pairs
    with pytest.raises(DataError, match=r"data\.chosen is typed in data\.parts\.a and None in data\.parts\.b"):
        Mixture(parts).prepare()


def test_parts_with_several_inputs_keep_them_and_a_part_that_reads_too_many_rows_is_an_error():
    pairs = {n: TensorData((torch.arange(n).float(), torch.arange(n) * 2), torch.arange(n), 0, 0) for n in (4, 6)}
    mixed = Mixture({"four": pairs[4], "six": pairs[6]})
    mixed.prepare()
    batch = TrainBatches(mixed.train, 8, seed=1)[1]
    assert torch.equal(batch.inputs[0].long(), batch.targets) and torch.equal(batch.inputs[1], batch.targets * 2)
    read = pairs[6].train.read
    pairs[6].train.read = lambda indices, epoch: read(np.append(indices, 0), epoch)
    with pytest.raises(DataError, match="returned 9 rows for 8 indices"):
        TrainBatches(mixed.train, 8, seed=1)[1]
