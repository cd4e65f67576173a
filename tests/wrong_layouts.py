"""Faults of layouts: ways in which programs that divide a training among ranks were wrong, and no error told.

Each is rebuilt by a patch of this project, which acts if there is more than one rank. A source is a report of such a
fault elsewhere; the patch has its effect, not its code. Those without a source are of the same kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.instantiate import to_config, to_dict
from data.dataset import Batch
from data.tensors import TensorData
from launchers import World
from models.batchnorm import BatchNorm1d
from models.chain import Chain, LayerSpec
from models.given import set_given
from models.gpt2 import gpt2
from models.llama import llama
from models.losses import ClassCrossEntropy
from models.moe import moe
from parallel import gradients
from parallel.auxiliary import AuxiliaryLosses
from parallel.axes import tensor
from parallel.axes.context import ContextParallel
from parallel.axes.context_attention import ContextAttention
from parallel.axes.replicas import Replicas
from parallel.axes.tensor import TensorParallel, VocabularyShard
from parallel.batchnorm import RunningStatistics
from parallel.gradients import Gradients
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


def _normed() -> Chain:
    layers = {"a": partial(nn.Linear, 8, 8), "norm": partial(BatchNorm1d, 8), "relu": nn.ReLU}
    specs = [LayerSpec(name, build) for name, build in {**layers, "c": partial(nn.Linear, 8, 3)}.items()]
    return Chain(specs, loss=ClassCrossEntropy())


MODELS: Mapping[str, tuple[Callable[[], Chain], Sequence[str]]] = {
    "gpt2": (partial(gpt2, "tiny", **_SIZES, dropout=0.1), ["train.label_smoothing=0.1"]),
    "llama": (partial(llama, "tiny", **_SIZES, **_LLAMA, mlp_width=64, qk_norm=True), []),
    "moe": (partial(moe, **_SIZES, **_LLAMA, experts=4, expert_width=32, balance=0.1), []),
    "recomputed": (partial(gpt2, "tiny", **_SIZES), ["train.activation_checkpointing=true"]),
    "normed": (_normed, []),
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


# -- what a fault does: (original, *its arguments) ---------------------------------------------------------------------


def _then(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that changes what a method returns by ``change(self, result)``."""
    return lambda original, self, *args, **named: change(self, original(self, *args, **named))


def _own_targets(original: Callable, self: LocalStrategy, batch: Batch) -> None:
    dist.all_reduce(total := (mine := (batch.targets != -100).sum().double()).clone())
    for stage in self.stages:
        stage.loss_scale *= float(total / mine / dist.get_world_size())
    original(self, batch)


def _others_targets(original: Callable, self: ContextParallel, batch: Batch) -> Batch:
    part = original(self, batch)
    return replace(part, targets=batch.targets[:, self.attention.positions_of[1 - self.ranks.index]])


def _others_recomputed(original: Callable, self: Stage, name: str, layer: Any, where: Any, given: Any, *more: Any):
    if self.training and torch._C._current_graph_task_id() != -1:  # in a backward
        given = given.roll(1, 0)
    return original(self, name, layer, where, given, *more)


def _first_sums(original: Callable, self: Strategy, vector: Tensor) -> list[float]:
    first, total = vector.clone(), original(self, vector)
    if len(total) > 4:  # the numbers of a step
        dist.broadcast(first, 0)
        total[0] = float(first[0] / first[1]) * total[1]
    return total


def _later_evaluated(original: Callable, self: Strategy, batch: Batch, number: int = 1, *more: Any) -> Tensor:
    return original(self, batch if number == 1 else replace(batch, inputs=batch.inputs.flip(1)), number, *more)


def _stale(original: Callable, self: Optimizer, lr: float) -> None:
    weight = self.made[0].param_groups[0]["params"][0]
    before = weight.detach().clone()
    original(self, lr)
    if dist.get_rank() == 1:
        weight.data.copy_(before)


def _rounded_gradients(original: Callable, self: Stage, *args: Any, **named: Any) -> Any:
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.bfloat16())
    return original(self, *args, **named)


def _summed_experts(original: Callable, self: Replicas, names: Mapping[nn.Parameter, Sequence[str]]) -> None:
    original(self, names)
    for parameter, (name, *_) in names.items():
        if "experts" in name:
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
        owner, attribute: What is replaced.
        new: The function in its place. It gets the original one before the arguments.
    """

    name: str
    source: str
    model: str
    layout: Layout
    says: str
    owner: Any
    attribute: str
    new: Callable[..., Any]


FAULTS = {fault.name: fault for fault in [
    Fault("label smoothing by the mean of each rank's words", "Megatron-LM 7452 (1), 737", "gpt2", TENSOR,
          "forward of head", VocabularyShard, "sum",
          lambda whole, self, x: torch.cat([whole(self, x.clone())[:2], 2 * x[2:]])),
    Fault("whole logits taken for a part: the loss has log 2 too much", "Megatron-LM 7452 (2)", "gpt2", TENSOR,
          "forward of head", VocabularyShard, "sum", _then(lambda _, sums: torch.cat([2 * sums[:1], sums[1:]]))),
    Fault("the mean over each replica's own number of targets", "Megatron-LM 7452 (3)", "llama", DDP,
          "backward of head", LocalStrategy, "forward_backward", _own_targets),
    Fault("a recomputation from other samples", "Megatron-LM 7452 (4)", "recomputed", DDP,
          r"backward of h\.1", Stage, "compute_layer", _others_recomputed),
    Fault("the targets of another rank's positions", "Megatron-LM 7452 (5)", "llama", GATHER,
          "forward of head", ContextParallel, "part_of_batch", _others_targets),
    Fault("a product summed with other samples' parts", "Megatron-LM 7452 (6)", "llama", TENSOR,
          r"forward of layers\.0", TensorParallel, "_rows",
          lambda rows, self, *of: rows(self, *of[:-1], of[-1].roll(self.ranks.index, 0))),
    Fault("each rank has the first part of the sequence", "Megatron-LM 7452 (7)", "llama", SEQUENCE,
          "forward of embedding", tensor, "_local_chunk", lambda _, x, axis: x.chunk(axis.size, 1)[0].contiguous()),
    Fault("the norm of one rank's parts", "Megatron-LM 7452 (8), 5916", "llama", TENSOR,
          "gradient norm", Gradients, "squared_norm", _then(lambda _, norm: norm * (dist.get_rank() == 0))),
    Fault("the mean over each part of a sequence", "Megatron-LM 7452 (9)", "llama", GATHER,
          "backward of head", LocalStrategy, "forward_backward", _own_targets),
    Fault("the balance's gradient counted by each rank", "Megatron-LM 7452 (10)", "moe", SEQUENCE,
          r"(backward of layers\.|gradient of .*mlp\.gate)", AuxiliaryLosses, "step",
          lambda step, self, factor: step(self, 2 * factor)),
    Fault("gradients of heads' norms not summed", "Megatron-LM 7452 (11)", "llama", TENSOR,
          r"first in the gradient of .*[qk]_norm", TensorParallel, "finish_gradients", lambda *_: None),
    Fault("layers of a checkpoint by their number in the stage", "Megatron-LM 7452 (12)", "llama", PIPE,
          "next step", Strategy, "load_state_dict",
          lambda load, self, state, *wanted: load(
              self, {name: state[name.replace("layers.1.", "layers.0.")] for name in state}, *wanted)),
    Fault("later evaluations of other positions", "Megatron-LM 7452 (13)", "llama", GATHER,
          "evaluation val_", Strategy, "eval_step", _later_evaluated),
    Fault("gradients of experts summed over replicas", "Megatron-LM 7452 (C)", "moe", EXPERT,
          "first in the gradient of .*experts", Replicas, "finish_gradients", _summed_experts),
    Fault("gradients of norms not summed where the sequence is divided", "Megatron-LM 1446 (TTrace)", "llama", SEQUENCE,
          "first in the gradient of .*norm", TensorParallel, "finish_gradients", lambda *_: None),
    Fault("the router's gradient not summed where the sequence is divided", "Megatron-LM 599 (TTrace)", "moe", SEQUENCE,
          r"first in the gradient of .*mlp\.gate", TensorParallel, "finish_gradients",
          lambda finish, self, names: finish(self, {p: of for p, of in names.items() if "mlp.gate" not in of[0]})),
    Fault("gradients of other ranks' keys lost", "Megatron-LM 1464 (TTrace)", "llama", GATHER,
          r"backward of layers\.1", ContextAttention, "home", lambda _, self, gradients, dtype: [*gradients][0]),
    Fault("the gradient of a region's input not summed", "SkyRL 1886", "llama", TENSOR,
          "backward of head", tensor._Collective, "backward",
          lambda back, ctx, x: (x, *[None] * 3) if ctx.backward_op is tensor._all_reduce else back(ctx, x)),
    Fault("queries, keys and values cut as one matrix", "bigcode Megatron-LM 35, torchtitan 3807", "gpt2", TENSOR,
          r"forward of h\.0", TensorParallel, "_replace",
          lambda cut, *args, groups=1, **named: cut(*args, **named)),
    Fault("the same dropout on ranks that share heads", "pytorch 168058", "gpt2", TENSOR,
          r"forward of h\.0", TensorParallel, "_part_of", lambda *_: {}),
    Fault("a tied gradient not summed", "Megatron-LM 1447, NeMo-RL 227", "gpt2", PIPE,
          r"first in the gradient of embedding\.wte\.weight", gradients, "_copies", lambda *_: []),
    Fault("the loss of the first replica shown", "torchtitan 3280, transformers 39674", "llama", DDP,
          "in (the )?loss", Strategy, "all_sum", _first_sums),
    Fault("a weight of one replica not updated", "Megatron-LM 950", "llama", DDP,
          "(forward of|same weights:) embedding", Optimizer, "step", _stale),
    Fault("gradients added up in bf16", "", "llama", DDP,
          "first in the gradient of ", Stage, "forward", _rounded_gradients),
    Fault("running statistics of one replica", "", "normed", DDP,
          r"buffers norm\.running", RunningStatistics, "__init__",
          lambda init, self, stages, chunks, *_: init(self, stages, chunks, None)),
]}  # fmt: skip


def _run_wrong(name: str, world: World, *args: Any) -> str:
    """Run jobs in a worker, wrong if there is more than one rank."""
    owner, attribute, new = (fault := FAULTS[name]).owner, fault.attribute, fault.new
    right = getattr(owner, attribute)
    with patch.object(owner, attribute, lambda *a, **k: new(right, *a, **k)) if world.size > 1 else nullcontext():
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


def tried(fault: Fault, runs: Runs) -> tuple[Compared, bool]:
    """Compare the fault's layout. Return the comparison, and whether the fault is found and the culprit named."""
    runs._before = runs.first  # not a fault that was missed
    with patch.object(verified, "_run_jobs", partial(_run_wrong, fault.name)):
        result = runs.compare(fault.layout)
        if result.differences and not result.holds:
            result.reason = first_difference(runs, result, [])
    return result, result.holds is False and re.search(fault.says, result.reason) is not None
