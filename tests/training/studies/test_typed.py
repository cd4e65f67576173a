"""What is typed of a layout beside parallel=auto: refused where it is impossible, before anything is measured; kept."""

from functools import cache
from pathlib import Path

import pytest
import torch
from composed import plain_typed, typed
from omegaconf import OmegaConf
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from common.errors import UserError
from conf.composition import Composed
from models.chain import Chain, LayerSpec
from models.losses import gather
from models.toy import toy
from parallel.layout import Layout
from planner.layout import PlannedLayout
from training.command.app import execute
from training.studies.planning import choice
from training.studies.planning.paper import predict_on_paper
from training.studies.planning.typed import check_kept

TOY = ("model=toy", "logger=none", "parallel=auto")
PAPER = ("mode=plan", "parallel=auto", "logger=none", "cluster=a100x64")


REFUSED = {
    "no ranks": ((*TOY, "parallel.pp=0"), r"parallel.pp=0 must be at least 1"),
    "a word": ((*TOY, "parallel.chunks=abc"), r"parallel.chunks=abc must be a whole number of at least 1, or auto"),
    "more micro-batches than samples": ((*TOY, "parallel.chunks=1000"), r"nearest is parallel=single .*chunks=64$"),
    "more stages than layers": ((*TOY, "parallel.pp=40"), r"3 layers on 40 devices allow no .* parallel.pp=40"),
    "a schedule that takes one stage": (
        (*TOY, "parallel.pp=2", "parallel.schedule=1f1b", "parallel.stages_per_rank=2"), r"=2; the nearest is .*=1f1b",
    ),
    "a stage without layers": ((*PAPER, "model=toy", "parallel.balance=[3,0]"), r"\[3,0\] must be 2 whole numbers"),
    "groups that do not fit": ((*TOY, "parallel.shard=3"), r"shard=3 does not divide .* possible sizes are 2"),
    "devices": ((*PAPER, "model=toy", "parallel.devices=[cpu,cpu]"), r"parallel.devices is for strategies of one"),
    "one number of layers": ((*TOY, "parallel.balance=5"), r"balance=5 is not known; .* the layers of each stage"),
    "layers that are not there": ((*TOY, "parallel.balance=[9,4]"), r"\[9,4\] must be 2 .* the sum 3"),
    "replicas that do not divide the batch": (
        (*PAPER, "model=resnet50", "parallel.dp=7"), r"parallel.dp=7; the nearest is parallel=pipe_ddp parallel.dp=8 ",
    ),
    "a sequence that is too long": ((*PAPER, "model=gpt2", "data.seq_len=5000"), r"longer than the model's 1024"),
    "a sequence that ranks do not divide": (
        ("model=gpt2", "model.size=tiny", "logger=none", "parallel=auto", "data.seq_len=15", "parallel.tp=2",
         "parallel.sequence=true"), r"among parallel.tp=2 ranks, and there are sequences of 15 positions",
    ),
    "no batch": ((*PAPER, "model=toy", "train.global_batch_size=0"), r"global_batch_size=0 must be at least 1"),
    "a cluster without a choice": (("model=toy", "mode=plan", "cluster=a100x64"), r"leave cluster= out"),
    "a cluster to compare on": (("model=toy", "mode=compare", "cluster=a100x64"), r"leave cluster= out"),
    "more than a peak": ((*PAPER, "model=toy", "cluster.product=1.5"), "product=1.5 must be a number from 0.0001 to 1"),
}  # fmt: skip


@pytest.mark.parametrize("words, says", REFUSED.values(), ids=REFUSED)
def test_what_is_impossible_is_refused_before_anything_is_measured(tmp_path, monkeypatch, words, says):
    monkeypatch.setattr(choice, "measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(UserError, match=says):
        execute(typed(*words, folder=tmp_path))


@cache
def strategies(*words):
    words = ("cluster.nodes=2", "model=gpt2", "model.size=tiny", "train.global_batch_size=256", *words)
    found, _ = predict_on_paper(plain_typed(*PAPER, *words))
    return {one.layout.strategy for one in found.best}


LEFT_OUT = [
    pytest.param("parallel.shard=4", {"single", "tensor", "pipelined", "ddp", "pipe_ddp"}, marks=pytest.mark.slow),
    ("parallel.comm_hook=bf16", {"fsdp", "hsdp", "pipe_fsdp"}),
    ("parallel.schedule=1f1b", {"single", "tensor", "ddp", "fsdp", "hsdp"}),
]


@pytest.mark.parametrize("word, left_out", LEFT_OUT)
def test_strategies_that_do_not_take_what_is_typed_are_left_out(word, left_out):
    assert strategies() - strategies(word) == left_out


def test_a_schedule_that_cannot_run_compiled_layers_is_left_out_and_refused_if_it_is_typed():
    words = (*PAPER, "model=gpt2", "model.size=tiny", "train.compile=true", "parallel.pp=2")
    found, _ = predict_on_paper(plain_typed(*words))
    assert {one.layout.schedule for one in found.best} == {"gpipe", "1f1b", "interleaved_1f1b"}
    with pytest.raises(UserError, match=r"a compiled layer has one backward, .*schedule=interleaved_zero_bubble"):
        predict_on_paper(plain_typed(*words, "parallel.schedule=interleaved_zero_bubble"))


@pytest.mark.parametrize("reshard", [True, False])
def test_what_is_typed_of_shared_parameters_is_predicted_as_a_run_has_it(reshard):
    typed_of_them = (f"parallel.reshard={reshard}", "parallel.shard=4", "parallel.dp=16")
    words = (*PAPER, "model=gpt2", "model.size=tiny", "train.global_batch_size=256", *typed_of_them)
    found, _ = predict_on_paper(plain_typed(*words))
    assert {one.layout.strategy for one in found.best} == {"fsdp", "hsdp", "pipe_fsdp"}
    assert {(one.layout.shards, one.layout.resharded) for one in found.best} == {(4, reshard)}


class Scaled(nn.Linear):
    """A layer with a parameter that has no rows."""

    def __init__(self) -> None:
        super().__init__(10, 10)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


def found_behind(layer, monkeypatch) -> list[PlannedLayout]:
    """The layouts that are advised for the toy behind another layer."""

    def behind(**sizes) -> Chain:
        chain = toy(**sizes)
        return Chain([LayerSpec("scaled", layer), *chain.layers], loss=chain.loss)

    monkeypatch.setattr("models.toy.toy", behind)
    found, _ = predict_on_paper(plain_typed(*PAPER, "model=toy"))
    return [one.layout for one in found.best]


def test_strategies_that_share_parameters_are_left_out_for_a_model_with_a_single_number(monkeypatch):
    assert {one.strategy for one in found_behind(Scaled, monkeypatch)} == {"single", "ddp", "pipelined", "pipe_ddp"}


def test_layouts_that_cut_the_batch_are_left_out_for_a_model_that_changes_its_state_with_each(monkeypatch):
    found = found_behind(lambda: spectral_norm(nn.Linear(10, 10)), monkeypatch)
    assert {(one.strategy, one.dp, one.chunks, one.recompute) for one in found} == {
        ("single", 1, 1, "none"), ("pipelined", 1, 1, "none"),
    }  # fmt: skip


class Gathering(nn.Linear):
    """A layer that takes the batch as a whole."""

    def forward(self, x):
        return super().forward(x) - gather(x).mean(0)


def test_micro_batches_are_left_out_for_a_layer_that_gathers_the_batch(monkeypatch):
    found = found_behind(lambda: Gathering(10, 10), monkeypatch)
    assert {one.chunks for one in found} == {1} and {"ddp", "fsdp"} <= {one.strategy for one in found}


class Reentrant(nn.Linear):
    """A layer that DistributedDataParallel refuses."""

    def forward(self, x):
        return checkpoint(super().forward, super().forward(x), use_reentrant=True)


def test_copies_of_the_model_are_left_out_for_a_reentrant_checkpoint(monkeypatch):
    found = {one.strategy for one in found_behind(lambda: Reentrant(10, 10), monkeypatch)}
    assert "fsdp" in found and not found & {"ddp", "pipe_ddp"}


def test_groups_of_replicas_are_those_of_the_nodes_that_a_layout_needs():
    """Four replicas fill half of one node of eight, twelve two of them by halves."""
    words = ("model=toy", "parallel.comm_hook=hierarchical", "train.global_batch_size=12")
    for dp, nodes in ((4, 1), (12, 2)):
        found, _ = predict_on_paper(plain_typed(*PAPER, *words, f"parallel.dp={dp}", "parallel.pp=1"))
        assert {(one.layout.strategy, one.layout.nodes) for one in found.best} == {("ddp", nodes)}


def test_ranks_that_do_not_divide_the_sequence_share_the_layers_alone():
    """Of eight devices in a node, two divide sequences of 18 positions, four and eight do not."""
    words = ("model=gpt2", "model.size=tiny", "train.global_batch_size=64", "data.seq_len=18")
    found, _ = predict_on_paper(plain_typed(*PAPER, *words))
    assert {(one.layout.tp, one.layout.sequence) for one in found.best} == {(1, False), (2, True), (4, False)}
    found, _ = predict_on_paper(plain_typed(*PAPER, *words, "parallel.sequence=true"))
    assert {one.layout.tp for one in found.best} == {1, 2}


def test_a_checkpoint_s_layout_is_kept_and_another_one_is_not_taken_without_a_word():
    saved = Layout("ddp", dp=2, schedule=None)
    check_kept(saved, plain_typed(*TOY, "parallel.dp=2"))
    with pytest.raises(UserError, match=r"parallel=ddp parallel.dp=2 .* and parallel.dp=4 is another"):
        check_kept(saved, plain_typed(*TOY, "parallel.dp=4"))
    divided = plain_typed(*TOY, "parallel.tp=2", "parallel.sequence=true")
    check_kept(Layout("tensor", tp=2, sequence=True), divided)
    with pytest.raises(UserError, match=r"parallel=tensor parallel.tp=2 .*, and parallel.sequence=true is another"):
        check_kept(Layout("tensor", tp=2), divided)


def test_a_further_logger_that_an_option_leaves_out_is_not_listed():
    choices = {"model": "toy", "logger": "jsonl", "logger@loggers.wandb": None, "logger@loggers.csv": "csv"}
    chosen, _ = Composed(OmegaConf.create({"model": {"name": "toy"}}), Path(), choices).differences()
    assert chosen["logger"] == "[jsonl,csv]"
