"""Samples that a data set of one's own reads: of any width, one for each index, and the same in every process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slow_cases import with_slow
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from common.errors import DataError
from data.dataset import DataSet, InMemory, Source
from data.loader import EvalBatches, TrainBatches
from models.losses import IGNORED, TokenCrossEntropy
from training import train
from training.run.checks.data import check_read

WORDS = ["optim=sgd", "optim.lr=0.5", "train.epochs=null", "train.steps=3", "train.global_batch_size=8", "logger=none"]
WORDS += ["train.precision=fp64", "device=cpu", "parallel.threads=1", "scheduler=constant"]


class Padded(Source):
    """Texts, padded to the longest of those that are read together."""

    def __init__(self):
        drawn = np.random.default_rng(0)
        self.texts = [torch.from_numpy(drawn.integers(1, 10, drawn.integers(2, 20))) for _ in range(32)]

    def __len__(self):
        return len(self.texts)

    def read(self, indices, epoch):
        inputs = [self.texts[index] for index in indices]
        targets = [3 * text % 10 for text in inputs]
        return pad_sequence(inputs, batch_first=True), pad_sequence(targets, batch_first=True, padding_value=IGNORED)


class Texts(DataSet):
    """Its batches are as wide as their longest text."""

    def prepare(self):
        self.train, self.valid, self.test, self.description = Padded(), None, None, "texts"


def losses_of(folder, layout, data):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 8), nn.Tanh(), nn.Linear(8, 10))
    result = train(
        f"parallel={layout}", *WORDS, f"hydra.run.dir={folder}", model=net, loss=TokenCrossEntropy(), data=data
    )
    return [record["loss"] for record in result.metrics if "loss" in record]


@pytest.mark.parametrize("layout", with_slow(["ddp", "fsdp", "pipe_ddp"], ["ddp"]))
def test_replicas_whose_samples_are_padded_to_other_widths_learn_what_one_process_learns(tmp_path, layout):
    single = losses_of(tmp_path / "single", "single", Texts())
    assert losses_of(tmp_path / layout, layout, Texts()) == pytest.approx(single, rel=1e-12)


class Thinned(InMemory):
    """Leaves out what it does not like."""

    def read(self, indices, epoch):
        return super().read(indices[indices != 3], epoch)


def test_a_row_that_is_missing_is_an_error_that_counts_them():
    source = Thinned(torch.randn(8, 2), torch.zeros(8))
    with pytest.raises(DataError, match=r"Thinned.read\(\) returned 7 rows for 8 indices"):
        TrainBatches(source, 8, seed=1)[1]
    with pytest.raises(DataError, match=r"Thinned.read\(\) returned 7 rows for 8 indices"):
        next(iter(EvalBatches(source, 8)))


class Noisy(InMemory):
    """Adds other noise at each call."""

    def read(self, indices, epoch):
        inputs, targets = super().read(indices, epoch)
        return inputs + torch.rand_like(inputs), targets


def setup_of(source):
    return SimpleNamespace(data=SimpleNamespace(train=source))


def test_a_sample_that_is_another_one_each_time_is_refused():
    with pytest.raises(DataError, match=r"Noisy.read\(\) returned another sample .* seeded by \(epoch, index\)"):
        check_read(setup_of(Noisy(torch.randn(8, 2), torch.zeros(8))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_that_is_not_a_number_equals_itself(dtype):
    check_read(setup_of(InMemory(torch.full((8, 2), float("nan"), dtype=dtype), torch.zeros(8))))
