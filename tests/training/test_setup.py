"""What is checked before a run starts, and how long it will be."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from composed import config

from common.errors import UserError
from models.chain import Chain, LayerSpec
from models.losses import SquaredError
from training.setup import describe, prepare, total_steps

TINY = ["model=gpt2", "model.size=tiny"]
NOWHERE = "/no/such/place"

# Besides those of test_cli_errors. Overrides, and all that the message must say.
CASES = {
    "a batch smaller than its cut": (
        ["parallel=pipe_ddp", "parallel.dp=2", "train.global_batch_size=5"],
        ["train.global_batch_size=5", "dp=2 x chunks=4", "the smallest that can is 8"],
    ),
    "chunks that do not fill interleaved rounds": (
        [*TINY, "parallel=pipelined", "parallel.schedule=interleaved_1f1b", "parallel.chunks=5"]
        + ["train.global_batch_size=5"],
        ["interleaved_1f1b", "parallel.chunks=5", "parallel.pp=2", "4 and 6"],
    ),
    "a split backward that is compiled": (
        [*TINY, "parallel=pipelined", "parallel.schedule=planned", "train.compile=true"],
        ["train.compile=true", "parallel.schedule=planned", "parallel.schedule=interleaved_1f1b"],
    ),
    "an unknown balance": (
        ["parallel=pipelined", "parallel.balance=fair"],
        ["parallel.balance=fair", "uniform", "size", "parallel.balance=[2,1]"],
    ),
    "a balance of another number of layers": (
        ["parallel=pipelined", "parallel.balance=[2,2]"],
        ["parallel.balance=[2,2]", "2 whole numbers", "the sum 3", "parallel.balance=[2,1]"],
    ),
    "replicas of single": (["parallel.dp=2"], ["parallel=single", "parallel.dp=2", "parallel=ddp"]),
    "stages of single": (["parallel.pp=2"], ["parallel=single", "parallel.pp=2", "parallel=pipelined"]),
    "no chunks": (["parallel.chunks=0"], ["parallel.chunks=0", "at least 1"]),
    "numbers for a model of tokens": (
        [*TINY, "data=random_regression"],
        ["model=gpt2", "numbers", "leave data= out"],
    ),
    "tokens for a model of numbers": (
        ["data=text", "data.root=."],
        ["model=toy", "tokens", "leave data= out"],
    ),
    "too small a vocabulary": (
        [*TINY, "model.vocab_size=100"],
        ["50257", "model.vocab_size=100", "model.vocab_size=50257 or more"],
    ),
    "longer than the positions": (
        [*TINY, "model.block_size=64", "data.seq_len=256"],
        ["data.seq_len=256", "64 positions", "data.seq_len=64", "model.block_size=256"],
    ),
    "heads that do not divide the width": ([*TINY, "model.n_head=5"], ["n_embd=64", "n_head=5"]),
    "other features than the model's": (["data.in_features=7"], ["7", "10"]),
    "no data folder": ([*TINY, "data=text"], ["data.root=FILE_OR_FOLDER"]),
    "a WikiText folder that is not there": (
        [*TINY, "data=wikitext2", f"data.root={NOWHERE}"],
        [NOWHERE, "train.txt"],
    ),
    "no steps": (["train.steps=0"], ["train.steps=0", "at least 1"]),
    "no epochs": (["train.epochs=0"], ["train.epochs=0", "above 0"]),
    "no samples": (["train.global_batch_size=0"], ["train.global_batch_size=0", "at least 1"]),
    "clipping to nothing": (["train.grad_clip=0"], ["train.grad_clip=0", "above 0"]),
    "a negative rhythm": (["train.eval_every=-1"], ["train.eval_every=-1", "at least 0"]),
    "a negative warm-up": (
        ["scheduler=cosine_warmup", "scheduler.warmup_steps=-1"],
        ["scheduler.warmup_steps=-1"],
    ),
    "a negative learning rate": (["optim.lr=-1"], ["-1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_run_is_refused_before_it_starts_with_numbers_and_a_way_out(case):
    overrides, wanted = CASES[case]
    with pytest.raises(UserError) as error:
        prepare(config(*overrides))
    assert [words for words in wanted if words not in str(error.value)] == [], str(error.value)


@pytest.mark.skipif(find_spec("datasets") is not None, reason="Hugging Face datasets is installed here")
def test_wikitext_without_a_folder_and_without_a_downloader_says_both_ways_out(tmp_path):
    with pytest.raises(UserError) as error:
        prepare(config(*TINY, "data=wikitext2", f"data.cache_dir={tmp_path}"))
    assert "data.root=" in str(error.value) and "pip install datasets" in str(error.value)


def test_gpus_that_are_not_there_are_missed_by_name():
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="device=cuda but this machine has none; here are: cpu"):
        prepare(config("device=cuda"))


@pytest.mark.parametrize(
    "steps, epochs, expected",
    [(7, None, 7), (None, 2, 20), (7, 2, 7), (30, 2, 20), (None, 0.25, 3), (None, 1.01, 11), (1000, 0.1, 1)],
)
def test_a_run_ends_with_its_steps_or_its_epochs_whichever_comes_first(steps, epochs, expected):
    assert total_steps(steps, epochs, per_epoch=10) == expected


def test_an_epoch_has_as_many_steps_as_whole_batches():
    setup = prepare(config("data.samples=1000", "train.global_batch_size=64", "train.epochs=2"))
    assert (setup.per_epoch, setup.total_steps) == (15, 30)


def test_the_sample_has_the_shape_of_one_micro_batch(text):
    setup = prepare(config(*TINY, *text, "parallel.chunks=4", "train.global_batch_size=8"))
    assert setup.sample.inputs.shape == setup.sample.targets.shape == (2, 32)
    assert setup.tokens_per_sample == 32


@pytest.mark.parametrize(
    "words, said",
    [
        (["parallel=ddp", "parallel.dp=2"], "of 32: the numbers of parallel=single parallel.chunks=2"),
        (
            ["parallel=ddp", "parallel.dp=2", "parallel.sync_batchnorm=true"],
            "of 64 (32 of each of 2 replicas): the numbers of parallel=single parallel.chunks=1",
        ),
        (
            ["parallel=ddp", "parallel.dp=2", "parallel.chunks=2", "parallel.sync_batchnorm=true"],
            "of 32 (16 of each of 2 replicas): not the numbers of parallel=single parallel.chunks=2, where other "
            "samples meet",
        ),
        ([], None),
    ],
    ids=["micro-batches", "synchronised", "synchronised micro-batches", "single"],
)
def test_the_plan_says_over_what_batchnorm_normalises(words, said):
    setup = prepare(config("model=convnet", "train.global_batch_size=64", "device=cpu", *words))
    assert setup.by_microbatch[1] == ([] if said is None else [f"BatchNorm over micro-batches {said}"])
    assert (said or "")[3:5] in setup.by_microbatch[0]


class OwnDropout(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.1, self.training)


def test_the_plan_names_layers_that_draw_by_themselves():
    setup = prepare(config("train.global_batch_size=4", "device=cpu"))
    layers = [LayerSpec(f"h.{i}", lambda: OwnDropout(10, 10)) for i in range(5)]
    for count, said in ((1, "layer h.0 draws by itself"), (5, "layers h.0, h.1, h.2 and 2 more draw by themselves")):
        mine = replace(setup, chain=Chain(layers[:count], loss=SquaredError()))
        assert mine.by_microbatch == ("4", [f"numbers depend on the micro-batch (4 samples): {said}"])
        assert said in describe(mine)
