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


@pytest.mark.skipif(find_spec("datasets") is not None, reason="Hugging Face datasets is installed here")
def test_wikitext_without_a_folder_and_without_a_downloader_says_both_ways_out(tmp_path):
    with pytest.raises(UserError) as error:
        prepare(config(*TINY, "data=wikitext2", f"data.cache_dir={tmp_path}"))
    assert "data.root=" in str(error.value) and "pip install datasets" in str(error.value)


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
