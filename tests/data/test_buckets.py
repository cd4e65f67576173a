"""Batches of similar length: the same shapes and the same samples on every number of replicas."""

import numpy as np
import pytest
import torch

from data.loader import WINDOW, Buckets, TrainBatches, VariableLength, bucket_widths


class Lengths(VariableLength):
    """Sample i is its number, as often as it is long; the rest is -1."""

    def __init__(self, lengths, longest: int = 256):
        self.all = np.asarray(lengths)
        self.widths = bucket_widths(longest)

    def __len__(self):
        return len(self.all)

    def lengths(self, indices):
        return self.all[indices]

    def read(self, indices, epoch, width=None):
        width = width or self.widths[-1]
        inputs = np.where(np.arange(width) < self.all[indices][:, None], indices[:, None], -1)
        return torch.from_numpy(inputs), torch.from_numpy(indices)


@pytest.fixture
def source() -> Lengths:
    random = np.random.default_rng(3)
    return Lengths(np.clip(np.exp(random.normal(4, 0.7, 5003)), 1, 256).astype(int))


@pytest.mark.parametrize(
    "longest, widths",
    [(1024, (128, 256, 384, 512, 768, 1024)), (256, (32, 64, 96, 128, 192, 256)), (20, (8, 16, 20)), (3, (3,))],
)
def test_widths_are_few_multiples_of_8_and_the_longest(longest, widths):
    assert bucket_widths(longest) == widths


@pytest.mark.parametrize("dp_size", [2, 4])
def test_the_slices_of_all_replicas_have_one_shape_and_make_up_the_global_batch(source, dp_size):
    whole = TrainBatches(source, 8, 1)
    parts = [TrainBatches(source, 8, 1, rank, dp_size) for rank in range(dp_size)]
    assert {part.steps_per_epoch for part in parts} == {whole.steps_per_epoch}
    for step in (1, 2, 77, whole.steps_per_epoch, whole.steps_per_epoch + 1):
        slices = [part[step] for part in parts]
        assert {one.inputs.shape for one in slices} == {(8 // dp_size, whole[step].inputs.shape[1])}
        assert torch.equal(torch.cat([one.inputs for one in slices]), whole[step].inputs)


def test_a_batch_has_the_narrowest_width_that_holds_its_longest_sample(source):
    batches = TrainBatches(source, 8, 1)
    seen = set()
    for step in range(1, 200):
        batch = batches[step]
        longest, width = int(source.all[batch.targets].max()), batch.inputs.shape[1]
        assert width == min(w for w in source.widths if w >= longest)
        seen.add(width)
    assert seen <= set(source.widths) and len(seen) > 2


def test_an_epoch_gives_each_sample_at_most_once_and_every_epoch_others_in_another_order(source):
    batches = TrainBatches(source, 8, 1)
    steps = batches.steps_per_epoch
    assert steps == 5003 // 8
    epochs = [[i for s in range(steps) for i in batches[e * steps + s + 1].targets.tolist()] for e in range(2)]
    assert all(len(set(epoch)) == len(epoch) == steps * 8 for epoch in epochs)
    assert epochs[0] != epochs[1] and set(epochs[0]) != set(epochs[1])


def test_the_samples_of_a_window_are_those_without_buckets_with_less_than_half_of_the_padding(source):
    bucketed, plain = TrainBatches(source, 8, 1), TrainBatches(source, 8, 1)
    plain.buckets = None
    padding = {}
    for name, batches in (("bucketed", bucketed), ("plain", plain)):
        read = [batches[step] for step in range(1, 2 * WINDOW + 1)]
        padding[name] = sum((b.inputs == -1).sum().item() for b in read) / sum(b.inputs.numel() for b in read)
        windows = [sorted(i for b in part for i in b.targets.tolist()) for part in (read[:WINDOW], read[WINDOW:])]
        assert windows == padding.setdefault("windows", windows)
    assert padding["plain"] > 0.7 and padding["bucketed"] < 0.25


def test_short_and_long_batches_come_mixed_and_so_do_samples_within_a_batch(source):
    batches = TrainBatches(source, 8, 1)
    lengths = [source.all[batches[step].targets] for step in range(1, WINDOW + 1)]
    middle = [np.median(one) for one in lengths]
    assert middle != sorted(middle) and middle != sorted(middle, reverse=True)
    longest_first = np.mean([one[:4].mean() > one[4:].mean() for one in lengths])
    assert 0.2 < longest_first < 0.8


def test_a_step_is_a_function_of_seed_and_step_alone(source):
    forward = TrainBatches(source, 8, 1)
    expected = {step: forward[step].inputs for step in range(1, 150)}
    backward = TrainBatches(source, 8, 1)
    for step in reversed(expected):
        assert torch.equal(backward[step].inputs, expected[step])
    assert not torch.equal(TrainBatches(source, 8, 2)[1].targets, forward[1].targets)


def test_data_of_less_than_a_window_is_one_window():
    source = Lengths([5, 1, 9, 30, 31, 32, 2])
    assert len(source) // 2 < WINDOW
    buckets = Buckets(source, 2, seed=1)
    indices = np.concatenate([buckets.batch(0, step)[0] for step in range(3)])
    assert len(set(indices.tolist())) == 6
