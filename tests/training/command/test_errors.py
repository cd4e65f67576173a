"""What goes wrong in a layer says where in the step, under every strategy; a lack of memory says the way out."""

import bdb
import gc
import io
import math
import os
import pdb
import re
import traceback

import pytest
import torch
import torch.distributed as dist
from composed import change_batches, config, for_rank, run, run_on_rank
from torch import nn

from common.errors import TrainingError, format_exception, message_for_user
from data.dataset import Batch
from models.losses import SquaredError
from parallel.stage import Stage
from parallel.strategy import Strategy
from training.run.prepare import prepare
from training.run.rank import run as train

LAYOUTS = {
    "single": (1, ["parallel.chunks=2"]),
    "fsdp": (2, ["parallel.dp=2"]),
    "pipelined": (2, ["parallel.pp=2", "parallel.chunks=2", "parallel.balance=[1,2]"]),
    "pipe_ddp": (4, ["parallel.dp=2", "parallel.pp=2", "parallel.balance=[1,2]"]),
}
QUICK = ["parallel.timeout_s=30", "train.precision=fp32"]


def fail():
    raise ArithmeticError("my own problem")


def run_out():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. See documentation for more")


FAULTS = {
    "own": fail,
    "memory": run_out,
    "main memory": lambda: torch.empty(1 << 50),
    "label": lambda: nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 3])),
}


def said_on_rank(tree, folder, meeting, fault, backward):
    """What a user reads of the error that the second call of a ReLU in a training step, or its backward, raises."""
    forward, calls = nn.ReLU.forward, []

    def broken(self, x):
        if not self.training or type(x) is not torch.Tensor or x.is_meta:  # while shapes are looked for
            return forward(self, x)
        calls.append(x)
        if len(calls) == 2 and not backward:
            FAULTS[fault]()
        output = forward(self, x)
        if len(calls) == 2:
            output.register_hook(lambda gradient: FAULTS[fault]())
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.ReLU, "forward", broken)
        try:
            run_on_rank(tree, folder, meeting)
        except Exception as error:
            said = message_for_user(error) or format_exception(error, error.__traceback__)
            traceback.clear_frames(error.__traceback__)  # they hold the connections for which the other ranks wait
    gc.collect()
    return said


RECOMPUTED, SPLIT = ["train.activation_checkpointing=true"], ["parallel.schedule=planned", "parallel.stages_per_rank=1"]


IN_A_LAYER = [
    ("single", [], False, "forward of layer 'relu' [(]ReLU[)], micro-batch 1 with 32 samples, step 1"),
    ("single", [], True, "backward of layers net1 … net2, micro-batch 1 with 32 samples, step 1"),
    ("single", RECOMPUTED, False, "backward of layer 'relu' [(]ReLU[)], micro-batch 0 with 32 samples, step 1"),
    ("fsdp", [], False, "forward of layer 'relu' [(]ReLU[)], micro-batch 0 with 32 samples, step 2, rank 0"),
    ("pipelined", [], True, "backward of layers relu … net2, micro-batch 1 with 32 samples, step 1, rank 1"),
    ("pipelined", SPLIT, True, "backward of layers relu … net2, micro-batch 1 with 32 samples, step 1, rank 1"),
    ("pipe_ddp", [], False, "forward of layer 'relu' [(]ReLU[)], micro-batch [15] with 8 samples, step 1, rank ."),
]


@pytest.mark.parametrize("layout, more, backward, place", IN_A_LAYER)
def test_an_error_in_a_layer_names_layer_step_micro_batch_and_rank(ranks, tmp_path, layout, more, backward, place):
    processes, where = LAYOUTS[layout]
    words = [*QUICK, "train.epochs=null", "train.steps=3", f"parallel={layout}", *where, *more]
    said = ranks.run(processes, said_on_rank, *for_rank(tmp_path, *words), "own", backward)
    told = [text for text in said if "my own problem" in text]
    assert any(re.search(rf"my own problem\nraised in the {place}\s*$", text) for text in told), said
    assert all("in fail\n" in text and "failed to run" not in text for text in told), "the user's own lines"


ELSEWHERE = [
    (SquaredError, "__call__", 3, "the forward of the loss (SquaredError), micro-batch 0 with 32 samples, step 2"),
    (Stage, "_in_order", 3, "the forward of layers net1 … net2, micro-batch 0 with 32 samples, step 1"),
    (nn.ReLU, "forward", 8, "the forward of layer 'relu' (ReLU), micro-batch 1 with 32 samples, evaluation"),
    (Batch, "chunks", 2, "step 2"),
]


@pytest.mark.parametrize("owner, function, calls, place", ELSEWHERE)
def test_an_error_elsewhere_in_a_step_names_what_is_known(tmp_path, monkeypatch, owner, function, calls, place):
    """In steps of two micro-batches; the first evaluation is after step 2."""
    real, called = getattr(owner, function), []

    def broken(*args, **kwargs):
        called.append(args)
        return fail() if len(called) == calls else real(*args, **kwargs)

    cfg = config(*QUICK, "train.epochs=null", "train.steps=2", "parallel.chunks=2")
    setup = prepare(cfg)
    monkeypatch.setattr(owner, function, broken)
    with pytest.raises(ArithmeticError) as error:
        train(setup, tmp_path)
    assert error.value.__notes__ == [f"raised in {place}"]


def test_an_error_of_another_kind_names_its_layer_before_anything_starts(monkeypatch):
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: {}["my key"])
    with pytest.raises(KeyError) as error:
        prepare(config())
    assert error.value.__notes__ == ["raised in layer 'relu' (ReLU), tried on a micro-batch without memory"]


def spoilt_on_rank(tree, folder, meeting, rank, backward):
    """The error with which a run ends in which the ReLU of ``rank``, or its backward, gives NaN from step 2 on."""
    mine = dist.get_rank() == rank if dist.is_initialized() else rank == 0
    forward, training_step, steps = nn.ReLU.forward, Strategy._step, []

    def spoilt(self, x):
        if not (mine and steps and steps[-1] == 2 and type(x) is torch.Tensor and self.training):
            return forward(self, x)
        if backward:
            x.register_hook(lambda gradient: gradient * math.nan)
        return forward(self, x) * (1.0 if backward else math.nan)

    def step(self, number=None, *args):
        steps.append(number)
        return training_step(self, number, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError) as error:
        patch.setattr(nn.ReLU, "forward", spoilt)
        patch.setattr(Strategy, "_step", step)
        run_on_rank(tree, folder, meeting)
    return str(error.value)


NOT_FINITE = [
    ("single", 0, True, "the gradient that layer 'relu' (ReLU) gives;"),
    ("fsdp", 1, True, "the gradient that layer 'relu' (ReLU) gives on rank 1;"),
    ("pipelined", 1, False, "the output of layer 'relu' (ReLU) on rank 1;"),
    ("pipe_ddp", 3, True, "the gradient that layer 'relu' (ReLU) gives on rank 3;"),
]


@pytest.mark.parametrize("layout, rank, backward, place", NOT_FINITE)
def test_numbers_that_are_not_finite_name_the_first_layer_and_the_rank(ranks, tmp_path, layout, rank, backward, place):
    processes, where = LAYOUTS[layout]
    length = ["train.epochs=null", "train.steps=3", "train.max_skipped=0", "train.eval_every=null"]
    task = for_rank(tmp_path, *QUICK, *length, f"parallel={layout}", *where)
    said = ranks.run(processes, spoilt_on_rank, *task, rank, backward)
    assert len(set(said)) == 1, "all ranks know"
    assert said[0].startswith("step 2: loss ") and f", first in {place} try " in said[0]


def test_data_that_are_not_finite_are_named_once(tmp_path, monkeypatch, capsys):
    change_batches(monkeypatch, (2, 3), lambda batch: Batch(batch.inputs, batch.targets * math.nan))
    run(tmp_path, "train.epochs=null", "train.steps=4")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "is skipped" in line]
    assert line == "step 2 is skipped: not finite, first in a target of the batch"


@pytest.mark.parametrize("fault", ["memory", "main memory"])
def test_exhausted_memory_ends_in_the_way_out(ranks, tmp_path, fault):
    (said,) = ranks.run(1, said_on_rank, *for_rank(tmp_path, *QUICK, "parallel.chunks=2"), fault, False)
    first, way_out = said.splitlines()
    place = "raised in the forward of layer 'relu' (ReLU), micro-batch 1 with 32 samples, step 1"
    assert first.startswith(f"memory is exhausted ({place}): ")
    assert "2.00 GiB." in first or "4503599627370496 bytes" in first
    words = ("parallel.chunks", "train.activation_checkpointing=true", "parallel=fsdp", "mode=plan")
    assert all(word in way_out for word in words)


def test_a_class_that_the_model_does_not_have_ends_in_the_way_out(ranks, tmp_path):
    (said,) = ranks.run(1, said_on_rank, *for_rank(tmp_path, *QUICK, "parallel.chunks=2"), "label", False)
    problem, place = said.splitlines()
    assert problem.startswith("Target 3 is out of bounds; classes count from 0: correct the targets, or ")
    assert place == "raised in the forward of layer 'relu' (ReLU), micro-batch 1 with 32 samples, step 1"


def debug() -> None:
    """As ``breakpoint()`` does where there is no input."""
    pdb.Pdb(stdin=open(os.devnull), stdout=io.StringIO()).set_trace()


def test_a_debugger_without_a_terminal_says_what_it_needs(monkeypatch):
    monkeypatch.setattr("sys.stdin", open(os.devnull))
    with pytest.raises(bdb.BdbQuit) as quitting:
        debug()
    said = message_for_user(quitting.value)
    line = debug.__code__.co_firstlineno + 2
    assert f"{__file__}, line {line}." in said and "have no terminal" in said and "parallel=single" in said
