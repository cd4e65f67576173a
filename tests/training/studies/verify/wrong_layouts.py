"""Faults of layouts: ways in which programs that divide a training among ranks were wrong, and no error told.

Each is rebuilt by a patch of this project, which acts if there is more than one rank. A source is a report of such a
fault elsewhere; the patch has its effect, not its code. Those without a source are of the same kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from zoo import SQUARE, chain_of, planted

from conf.instantiate import to_config, to_dict
from data.tensors import TensorData
from launchers import World
from models.batchnorm import BatchNorm1d
from models.given import set_given
from models.gpt2 import gpt2
from models.llama import llama
from models.moe import moe
from parallel.auxiliary import AuxiliaryLosses
from parallel.axes.context import ContextParallel
from parallel.axes.context_attention import ContextAttention
from parallel.axes.replicas import Replicas
from parallel.axes.tensor import TensorParallel, VocabularyShard, _all_reduce, _Collective, _local_chunk
from parallel.batchnorm import RunningStatistics
from parallel.gradients import Gradients, _copies
from parallel.layout import Layout
from parallel.stage import Stage
from parallel.strategy import LocalStrategy, Strategy
from training import load_config
from training.command.api import with_given
from training.optimizer.optimizer import Optimizer
from training.studies.verification import layouts as verified
from training.studies.verification.difference import first_difference
from training.studies.verification.layouts import PERTURBED, Compared, Runs, _run_jobs

MICROBATCHES, WORDS, LENGTH = 4, 64, 16
TENSOR = Layout("tensor", tp=2, chunks=4)
SEQUENCE = replace(TENSOR, sequence=True)
GATHER = Layout("context", cp=2, context="gather", chunks=4)
DDP = Layout("ddp", dp=2, chunks=2)
PIPE = Layout("pipelined", pp=2, chunks=4, schedule="1f1b")
EXPERT = Layout("expert", dp=2, ep=2, chunks=2)
_SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": WORDS, "block_size": LENGTH}
_LLAMA = {"kv_heads": 2, "head_dim": 8, "init_std": 0.1}
# Each with the words of its command.
MODELS = {
    "gpt2": (partial(gpt2, "tiny", **_SIZES, dropout=0.1), ["train.label_smoothing=0.1"]),
    "llama": (partial(llama, "tiny", **_SIZES, **_LLAMA, mlp_width=64, qk_norm=True), []),
    "moe": (partial(moe, **_SIZES, **_LLAMA, experts=4, expert_width=32, balance=0.1), []),
    "recomputed": (partial(gpt2, "tiny", **_SIZES), ["train.activation_checkpointing=true"]),
    "normed": (partial(chain_of, a=SQUARE, norm=partial(BatchNorm1d, 8), relu=nn.ReLU), []),
}


def data(model: str) -> TensorData:
    """Random samples: tokens, of which a few in the middle are answers and count; or numbers and classes."""
    of = torch.Generator().manual_seed(0)
    if model == "normed":
        return TensorData(torch.randn(64, 8, generator=of), torch.randint(0, 3, (64,), generator=of))
    tokens = torch.randint(0, WORDS, (64, LENGTH + 1), generator=of)
    begin, length = torch.randint(1, 1 + LENGTH // 2, (2, 64, 1), generator=of)
    counts = (begin <= torch.arange(LENGTH)) & (torch.arange(LENGTH) < begin + length)
    return TensorData(tokens[:, :-1], tokens[:, 1:].where(counts, -100), valid=0.2, vocab_size=WORDS)


# -- what a fault does: (right, *its arguments), where ``right`` is the function that it replaces ----------------------


def _own_targets(right, self, batch):
    dist.all_reduce(total := (mine := (batch.targets != -100).sum().double()).clone())
    for stage in self.stages:
        stage.loss_scale *= float(total / mine / dist.get_world_size())
    right(self, batch)


def _others_targets(right, self, batch):
    part = right(self, batch)
    return replace(part, targets=batch.targets[:, self.attention.positions_of[1 - self.ranks.index]])


def _others_recomputed(right, self, name, layer, where, given, *more):
    in_backward = self.training and torch._C._current_graph_task_id() != -1
    return right(self, name, layer, where, given.roll(1, 0) if in_backward else given, *more)


def _first_sums(right, self, vector):
    first, total = vector.clone(), right(self, vector)
    if len(total) > 4:  # the numbers of a step
        dist.broadcast(first, 0)
        total[0] = float(first[0] / first[1]) * total[1]
    return total


def _later_evaluated(right, self, batch, number=1, *more):
    return right(self, batch if number == 1 else replace(batch, inputs=batch.inputs.flip(1)), number, *more)


def _stale(right, self, lr):
    weight = self.made[0].param_groups[0]["params"][0]
    before = weight.detach().clone()
    right(self, lr)
    if dist.get_rank() == 1:
        weight.data.copy_(before)


def _rounded_gradients(right, self, *args, **named):
    for gradient in (p.grad for p in self.parameters() if p.grad is not None):
        gradient.copy_(gradient.bfloat16())
    return right(self, *args, **named)


def _summed_experts(right, self, names):
    right(self, names)
    for parameter in (p for p, (name, *_) in names.items() if "experts" in name):
        parameter.grad *= 2


@dataclass(frozen=True)
class Fault:
    """A fault of a layout.

    Attributes:
        name: What is wrong.
        source: Where it was reported; empty if it is only of the same kind as reported ones.
        model: A key of ``MODELS``.
        layout: A layout in which it acts.
        says: A pattern of what names the culprit.
        right: The function that is replaced.
        wrong: The function in its place. It gets the right one before the arguments.
    """

    name: str
    source: str
    model: str
    layout: Layout
    says: str
    right: Callable[..., Any]
    wrong: Callable[..., Any]


FAULTS = {fault.name: fault for fault in [
    Fault("label smoothing by the mean of each rank's words", "Megatron-LM 7452 (1), 737", "gpt2", TENSOR,
          "forward of head", VocabularyShard.sum,
          lambda right, self, x: torch.cat([right(self, x.clone())[:2], 2 * x[2:]])),
    Fault("whole logits taken for a part: the loss has log 2 too much", "Megatron-LM 7452 (2)", "gpt2", TENSOR,
          "forward of head", VocabularyShard.sum,
          lambda right, self, x: torch.cat([2 * right(self, x)[:1], x[1:]])),
    Fault("the mean over each replica's own number of targets", "Megatron-LM 7452 (3)", "llama", DDP,
          "backward of head", LocalStrategy.forward_backward, _own_targets),
    Fault("a recomputation from other samples", "Megatron-LM 7452 (4)", "recomputed", DDP,
          r"backward of h\.1", Stage.compute_layer, _others_recomputed),
    Fault("the targets of another rank's positions", "Megatron-LM 7452 (5)", "llama", GATHER,
          "forward of head", ContextParallel.part_of_batch, _others_targets),
    Fault("a product summed with other samples' parts", "Megatron-LM 7452 (6)", "llama", TENSOR,
          r"forward of layers\.0", TensorParallel._rows,
          lambda right, self, *of: right(self, *of[:-1], of[-1].roll(self.ranks.index, 0))),
    Fault("each rank has the first part of the sequence", "Megatron-LM 7452 (7)", "llama", SEQUENCE,
          "forward of embedding", _local_chunk, lambda _, x, axis: x.chunk(axis.size, 1)[0].contiguous()),
    Fault("the norm of one rank's parts", "Megatron-LM 7452 (8), 5916", "llama", TENSOR,
          "gradient norm", Gradients.squared_norm, lambda right, *of: right(*of) * (dist.get_rank() == 0)),
    Fault("the mean over each part of a sequence", "Megatron-LM 7452 (9)", "llama", GATHER,
          "backward of head", LocalStrategy.forward_backward, _own_targets),
    Fault("the balance's gradient counted by each rank", "Megatron-LM 7452 (10)", "moe", SEQUENCE,
          r"(backward of layers\.|gradient of .*mlp\.gate)", AuxiliaryLosses.step,
          lambda right, self, factor: right(self, 2 * factor)),
    Fault("gradients of heads' norms not summed", "Megatron-LM 7452 (11)", "llama", TENSOR,
          r"first in the gradient of .*[qk]_norm", TensorParallel.finish_gradients, lambda *_: None),
    Fault("layers of a checkpoint by their number in the stage", "Megatron-LM 7452 (12)", "llama", PIPE,
          "next step", Strategy.load_state_dict,
          lambda right, self, state, *wanted: right(
              self, {name: state[name.replace("layers.1.", "layers.0.")] for name in state}, *wanted)),
    Fault("later evaluations of other positions", "Megatron-LM 7452 (13)", "llama", GATHER,
          "evaluation val_", Strategy.eval_step, _later_evaluated),
    Fault("gradients of experts summed over replicas", "Megatron-LM 7452 (C)", "moe", EXPERT,
          "first in the gradient of .*experts", Replicas.finish_gradients, _summed_experts),
    Fault("gradients of norms not summed where the sequence is divided", "Megatron-LM 1446 (TTrace)", "llama", SEQUENCE,
          "first in the gradient of .*norm", TensorParallel.finish_gradients, lambda *_: None),
    Fault("the router's gradient not summed where the sequence is divided", "Megatron-LM 599 (TTrace)", "moe", SEQUENCE,
          r"first in the gradient of .*mlp\.gate", TensorParallel.finish_gradients,
          lambda right, self, names: right(self, {p: of for p, of in names.items() if "mlp.gate" not in of[0]})),
    Fault("gradients of other ranks' keys lost", "Megatron-LM 1464 (TTrace)", "llama", GATHER,
          r"backward of layers\.1", ContextAttention.home, lambda right, self, gradients, dtype: [*gradients][0]),
    Fault("the gradient of a region's input not summed", "SkyRL 1886", "llama", TENSOR,
          "backward of head", _Collective.backward,
          lambda right, ctx, x: (x, *[None] * 3) if ctx.backward_op is _all_reduce else right(ctx, x)),
    Fault("queries, keys and values cut as one matrix", "bigcode Megatron-LM 35, torchtitan 3807", "gpt2", TENSOR,
          r"forward of h\.0", TensorParallel._replace, lambda right, *of, groups=1, **named: right(*of, **named)),
    Fault("the same dropout on ranks that share heads", "pytorch 168058", "gpt2", TENSOR,
          r"forward of h\.0", TensorParallel._part_of, lambda *_: {}),
    Fault("a tied gradient not summed", "Megatron-LM 1447, NeMo-RL 227", "gpt2", PIPE,
          r"first in the gradient of embedding\.wte\.weight", _copies, lambda *_: []),
    Fault("the loss of the first replica shown", "torchtitan 3280, transformers 39674", "llama", DDP,
          "in (the )?loss", Strategy.all_sum, _first_sums),
    Fault("a weight of one replica not updated", "Megatron-LM 950", "llama", DDP,
          "(forward of|same weights:) embedding", Optimizer.step, _stale),
    Fault("gradients added up in bf16", "", "llama", DDP,
          "first in the gradient of ", Stage.forward, _rounded_gradients),
    Fault("running statistics of one replica", "", "normed", DDP,
          r"buffers norm\.running", RunningStatistics.__init__,
          lambda right, self, stages, chunks, *_: right(self, stages, chunks, None)),
]}  # fmt: skip


def _run_wrong(name: str, world: World, *args: Any) -> str:
    """Run jobs in a worker, wrong if there is more than one rank."""
    fault = FAULTS[name]
    with planted(fault.right, fault.wrong) if world.size > 1 else nullcontext():
        return _run_jobs(world, *args)


# -- verdicts ----------------------------------------------------------------------------------------------------------


@contextmanager
def reference(model: str, precision: str) -> Iterator[Runs]:
    """Run one process, and the runs that measure rounding. Layouts can be compared with them inside the block."""
    build, words = MODELS[model]
    objects = {"model": build(), "data": data(model)}
    set_given(objects)
    cfg = to_config(to_dict(with_given(load_config(
        "logger=none", "device=cpu", "parallel=single", "parallel.threads=1", "verify.steps=2", "verify.timeout_s=60",
        "verify.processes=2", "train.global_batch_size=8", f"train.precision={precision}", "seed=0", *words,
    ), objects)))  # fmt: skip
    try:
        with TemporaryDirectory() as folder, closing(Runs(cfg, Path(folder), objects["model"], MICROBATCHES)) as runs:
            for number in range(1 + PERTURBED * (precision != "fp64")):
                result = runs.compare(Layout(chunks=MICROBATCHES), None, number)
                assert result.holds, result.reason
            yield runs
    finally:
        set_given(None)


def tried(model: str, runs: Runs) -> Iterator[tuple[Fault, Compared, bool]]:
    """Yield each fault of a model, the comparison of its layout, and whether it is found and the culprit named."""
    for fault in (fault for fault in FAULTS.values() if fault.model == model):
        runs._before = runs.first  # not a fault that was missed
        with patch.object(verified, "_run_jobs", partial(_run_wrong, fault.name)):
            result = runs.compare(fault.layout)
            if result.differences and not result.holds:
                result.reason = first_difference(runs, result, [])
        yield fault, result, result.holds is False and re.search(fault.says, result.reason) is not None
