"""What ranks, and attempts one after the other, must have in common."""

import numpy as np
import pytest
import torch
from composed import config, run

from common.errors import LaunchError
from conf.instantiate import with_values
from data.dataset import InMemory
from data.text import Text
from parallel.mesh import COPIES, Mesh
from training.optimizer import WSD
from training.run.changes import _TOTAL as TOTAL
from training.run.changes import changes
from training.run.checks import ranks
from training.run.checks.ranks import check_ranks, describe_rank
from training.run.prepare import prepare
from training.run.setup import data_digest

FEW = ["train.epochs=null", "train.steps=2", "train.eval_every=null", "data.samples=200"]


class TwoRanks(Mesh):
    """A mesh whose rank 1 answers as ``other`` says."""

    other: dict = {}

    def gather(self, value):
        """Returns both answers."""
        return [value, ("n2", list({**dict(value[1]), **self.other}.items()))]


DRAWN, COPY = "generator with a fixed seed, .* if they read files, the same; launcher", "the same working copy"


@pytest.mark.parametrize("names", [["project files"], ["torch"], ["Python"], ["data"], ["data", "torch"]], ids=str)
def test_ranks_that_differ_are_refused_with_both_values_and_the_way_out(monkeypatch, names):
    setup = prepare(config(*FEW))
    assert check_ranks(TwoRanks({COPIES: 2}), setup) is None
    monkeypatch.setattr(TwoRanks, "other", dict.fromkeys(names, "0123456789ab"))
    for alike in {False, names == ["data"]}:
        with pytest.raises(LaunchError, match=DRAWN if names == ["data"] else COPY) as error:
            check_ranks(TwoRanks({COPIES: 2}), setup, alike)
    said = str(error.value)
    for name in names:
        assert f"{name}: {describe_rank(setup)[name]} on rank 0 (" in said and "0123456789ab on rank 1 (n2)" in said
    assert "launcher.allow_mixed=true" in said
    setup.cfg = with_values(setup.cfg, {"launcher.allow_mixed": True})
    assert "0123456789ab on rank 1 (n2)" in check_ranks(TwoRanks({COPIES: 2}), setup)


def test_the_digest_of_the_project_is_that_of_its_files(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    for name, content in (("train.py", "1\n"), ("models/toy.py", "relu\n"), ("models/notes.txt", "x")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(ranks, "_ROOT", tmp_path)
    before = ranks._project_digest()
    (tmp_path / "models/notes.txt").write_text("y")
    assert ranks._project_digest() == before
    (tmp_path / "models/toy.py").write_text("tanh\n")
    assert ranks._project_digest() != before


class Splits:
    """A data set of whole numbers."""

    vocab_size = seq_len = valid = test = None
    fingerprint = ""

    def __init__(self, numbers):
        self.train = InMemory(numbers, numbers)


def test_the_digest_of_data_is_that_of_its_samples_but_for_the_last_bits_of_computed_numbers():
    numbers = torch.arange(1000)
    assert data_digest(Splits(numbers)) == data_digest(Splits(numbers.clone()))
    longer, other_end = torch.arange(1001), numbers.clone()
    other_end[-1] = 0
    assert len({data_digest(Splits(n)) for n in (numbers, longer, other_end, numbers + 1)}) == 4
    computed = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 7)))
    assert data_digest(Splits(computed)) == data_digest(Splits(computed * (1 + 1e-7)))
    assert data_digest(Splits(computed)) != data_digest(Splits(computed * 1.1))


def test_two_words_in_another_order_anywhere_in_a_text_are_another_digest(tmp_path):
    def digest(text):
        (tmp_path / "text").write_text(text)
        data = Text(str(tmp_path / "text"), cache_dir=str(tmp_path / "cache"), vocabulary="words", seq_len=8)
        data.prepare()
        return data_digest(data)

    text = "one two three four five\n" * 2000
    middle = len(text) // 2
    other = text[:middle] + text[middle:].replace("two three", "three two", 1)
    assert len(other) == len(text)
    assert digest(text) == digest(text) != digest(other)


def warnings(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]


def test_a_run_that_is_resumed_with_other_settings_says_so_with_both_values(tmp_path, capsys):
    others = {
        "seed=7": "seed 1337 -> 7",
        "train.global_batch_size=50": "train.global_batch_size 64 -> 50",
        "data.samples=190": "data.samples 200 -> 190",
        "scheduler=step": "scheduler._target_ ",
        "optim.momentum=0.9": "optim.momentum 0.0 -> 0.9",
        "train.grad_clip=0.1": "train.grad_clip None -> 0.1",
        "train.precision=bf16": "train.precision fp32 -> bf16",
    }
    run(tmp_path, *FEW)
    run(tmp_path, *FEW, "train.resume=auto", "train.steps=3")
    assert "settings that differ" not in capsys.readouterr().err, "as it was"
    run(tmp_path, *FEW, "train.resume=auto", "train.steps=4", *others)
    (warning,) = warnings(capsys)
    assert "this run continues with settings that differ from those before" in warning
    assert [said for said in others.values() if said not in warning] == []


def test_a_run_with_batchnorm_that_is_resumed_on_other_micro_batches_says_so(tmp_path, capsys):
    convnet = ["model=convnet", "train.epochs=null", "train.eval_every=null", "train.precision=fp32"]
    run(tmp_path, *convnet, "train.steps=1")
    run(tmp_path, *convnet, "train.steps=2", "train.resume=auto", "parallel.chunks=2")
    (warning,) = warnings(capsys)
    assert warning.endswith("before: micro-batch 64 -> 32")


def test_another_text_under_the_same_name_is_seen_and_the_same_text_elsewhere_is_not_mentioned():
    before = {"data.root": "a", "data.cache_dir": "x", "samples": "0001"}
    assert changes(before, {**before, "data.root": "b", "data.cache_dir": "y"}, float) is None
    assert changes(before, {**before, "samples": "0002"}, float).endswith("digest of the data 0001 -> 0002")


@pytest.mark.parametrize("step, jumps", [(6, False), (9, True), (11, True)])
def test_a_longer_run_is_told_that_its_rate_jumps_only_where_it_does(step, jumps):
    schedule = WSD(warmup_steps=2, decay_steps=4)
    said = changes({TOTAL: 10}, {TOTAL: 20}, lambda total: schedule.factor(min(step, total), total, 1))
    assert f"{TOTAL} 10 -> 20" in said and ("jumps" in said) == jumps
