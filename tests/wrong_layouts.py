"""Faults of layouts: ways in which programs that divide a training among ranks were wrong, and no error told.

Each is rebuilt by a patch of this project, which acts if there is more than one rank. A source is a report of such a
fault elsewhere; the patch has its effect, not its code. Those without a source are of the same kinds.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conf.instantiate import to_config, to_dict
from data.dataset import Batch
from data.tensors import TensorData
from launchers import World
from models.attention import UsesCache
from models.batchnorm import BatchNorm1d
from models.chain import Chain, LayerSpec
from models.given import set_given
from models.gpt2 import gpt2
from models.llama import llama
from models.losses import ClassCrossEntropy
from models.moe import moe
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
from parallel.strategy import Strategy
from training import load_config
from training.command.api import with_given
from training.run.prepare import prepare
from training.studies.verification import layouts as verified
from training.studies.verification.difference import first_difference
from training.studies.verification.layouts import PERTURBED, Compared, Runs

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
    "llama": (partial(llama, "tiny", **_SIZES, **_LLAMA, mlp_width=64), []),
    "moe": (partial(moe, **_SIZES, **_LLAMA, experts=4, expert_width=32, balance=0.1), []),
    "recomputed": (partial(gpt2, "tiny", **_SIZES), ["train.activation_checkpointing=true"]),
    "normed": (_normed, []),
}


def data(model: str, seed: int = 0) -> TensorData:
    """Random samples: tokens of which the second half has many ignored targets, or numbers and classes."""
    of = torch.Generator().manual_seed(seed)
    if model == "normed":
        return TensorData(torch.randn(64, 8, generator=of), torch.randint(0, 3, (64,), generator=of))
    tokens = torch.randint(0, WORDS, (64, LENGTH + 1), generator=of)
    ignored = torch.rand(64, LENGTH, generator=of) < torch.rand(64, 1, generator=of) ** 2
    return TensorData(tokens[:, :-1], tokens[:, 1:].masked_fill(ignored, -100), vocab_size=WORDS)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# -- what a fault does: (original, *its arguments) ---------------------------------------------------------------------


def _then(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``change(self, result)`` after a method."""

    def changed(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
        result = original(self, *args, **named)
        new = change(self, result)
        return result if new is None else new

    return changed


def _of_rank(rank: int) -> Callable:
    return _then(lambda _, norm: norm * (_rank() == rank))


def _counted_by_each(original: Callable, self: Gradients, *of: Any) -> Tensor:
    with patch.object(self, "_counted", {True: [p for some in self._counted.values() for p in some]}):
        return original(self, *of)


def _scaled(factor: float, of: Callable[[Any], bool] = lambda name: True) -> Callable:
    """Scale the gradients whose first name passes ``of``, after an axis has finished all of them."""

    def changed(original: Callable, self: Any, names: Mapping[nn.Parameter, Sequence[str]]) -> None:
        original(self, names)
        for parameter, (name, *_) in names.items():
            if of(name) and parameter.grad is not None:
                parameter.grad *= factor

    return changed


def _without_routers(original: Callable, self: Any, names: Mapping[nn.Parameter, Sequence[str]]) -> None:
    original(self, {p: of for p, of in names.items() if "mlp.gate" not in of[0]})


def _own_targets(self: Strategy, batch: Batch) -> None:
    if batch.targets.dim() > 1 and torch.is_grad_enabled():
        mine = (batch.targets != -100).sum().double()
        dist.all_reduce(total := mine.clone())
        self._terms = float(self._usual_terms * mine * self.plan.dp / total)


def _with_usual_terms(original: Callable, self: Strategy, *args: Any) -> Any:
    self._terms = self._usual_terms
    return original(self, *args)


def _not_synchronized(original: Callable, self: Any, *args: Any, **named: Any) -> Any:
    self.require_backward_grad_sync = False
    return original(self, *args, **named)


def _rounded_gradients(original: Callable, self: Stage, *args: Any, **named: Any) -> Any:
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.bfloat16())
    return original(self, *args, **named)


def _own_statistics(original: Callable, self: Any, stages: Any, microbatches: int, *_: Any, **named: Any) -> None:
    original(self, stages, microbatches, None)


def _not_copied(original: Callable, self: Gradients) -> None:
    with patch.object(self, "_copies", []):
        original(self)


def _others_recomputed(original: Callable, self: Stage, name: str, layer: Any, where: Any, given: Any, *more: Any):
    if self.training and torch._C._current_graph_task_id() != -1:  # in a backward
        given = given.roll(1, 0)
    return original(self, name, layer, where, given, *more)


def _first_replicas(self: Strategy, result: Any) -> Any:
    loss, count, *_ = self.shown.tolist()
    mean = torch.tensor(loss / count)
    dist.broadcast(mean, 0)
    return replace(result, loss=float(mean))


@dataclass(frozen=True)
class Fault:
    """A fault of a layout.

    Attributes:
        name: What is wrong.
        source: Where it was reported; empty if it is only of the same kind as reported ones.
        model: A key of ``MODELS``.
        layout: A layout in which it acts.
        says: A pattern of what names the culprit.
        patches: (owner, attribute, function (original, *arguments), or another value).
    """

    name: str
    source: str
    model: str
    layout: Layout
    says: str
    patches: Sequence[tuple[Any, str, Any]] = ()

    def __reduce__(self):
        return _fault, (self.name,)

    def __call__(self, world: World, *args: Any) -> None:
        """Run jobs in a worker, wrong if there is more than one rank."""
        from training.studies.verification.layouts import _run_jobs

        with ExitStack() as stack:
            for owner, name, new in self.patches if world.size > 1 else ():
                if callable(new):
                    new = _method(getattr(owner, name), new)
                stack.enter_context(patch.object(owner, name, new))
            _run_jobs(world, *args)


def _method(original: Callable, new: Callable) -> Callable:
    return lambda *args, **named: new(original, *args, **named)


def _fault(name: str) -> Fault:
    return FAULTS[name]


_NOT_SENT = {False: (tensor._identity, tensor._identity), True: tensor._ENTER[True]}
FAULTS = {fault.name: fault for fault in [
    Fault("label smoothing by the mean of each rank's words", "Megatron-LM 7452 (1), 737", "gpt2", TENSOR,
          "forward of head", [(VocabularyShard, "sum",
                               lambda whole, self, x: torch.cat([whole(self, x.clone())[:2], 2 * x[2:]]))]),
    Fault("whole logits taken for a part: the loss has log 2 too much", "Megatron-LM 7452 (2)", "gpt2", TENSOR,
          "forward of head", [(VocabularyShard, "sum", _then(lambda _, sums: torch.cat([2 * sums[:1], sums[1:]])))]),
    Fault("the mean over each replica's own number of targets", "Megatron-LM 7452 (3)", "llama", DDP,
          "gradient of ", [(Strategy, "_placed", _then(_own_targets)), (Strategy, "_agree", _with_usual_terms)]),
    Fault("a recomputation from other samples", "Megatron-LM 7452 (4)", "recomputed", DDP,
          r"backward of h\.1", [(Stage, "compute_layer", _others_recomputed)]),
    Fault("the norm of one rank's parts", "Megatron-LM 7452 (8), 5916", "llama", TENSOR,
          "gradient norm", [(Gradients, "squared_norm", _of_rank(0))]),
    Fault("the norm counts replicated parameters on each rank", "ROCm TransformerEngine 715", "gpt2", TENSOR,
          "gradient norm", [(Gradients, "squared_norm", _counted_by_each)]),
    Fault("the norm of the last stage", "", "llama", PIPE,
          "gradient norm", [(Gradients, "squared_norm", _of_rank(1))]),
    Fault("gradients of norms not summed where the sequence is divided", "Megatron-LM 1446 (TTrace)", "llama", SEQUENCE,
          "gradient of .*norm", [(TensorParallel, "finish_gradients", lambda *_: None)]),
    Fault("the router's gradient not summed where the sequence is divided", "", "moe", SEQUENCE,
          r"gradient of .*mlp\.gate", [(TensorParallel, "finish_gradients", _without_routers)]),
    Fault("gradients of other ranks' keys lost", "Megatron-LM 1464 (TTrace)", "llama", GATHER,
          r"backward of layers\.1", [(ContextAttention, "home", lambda _, self, gradients, dtype: [*gradients][0])]),
    Fault("positions from 0 on each rank", "", "llama", GATHER,
          r"forward of layers\.0",
          [(UsesCache, "positions", lambda _, self, length, device: torch.arange(length, device=device))]),
    Fault("gradients averaged over ranks that share a sequence", "", "llama", GATHER,
          "gradient of ", [(ContextParallel, "finish_gradients", _scaled(0.5))]),
    Fault("the gradient of a region's input not summed", "SkyRL 1886", "llama", TENSOR,
          "backward of head", [(tensor, "_ENTER", _NOT_SENT)]),
    Fault("the vocabulary cut one word short", "", "gpt2", TENSOR,
          "forward of embedding",
          [(TensorParallel, "_embed", lambda embed, self, module, words, tokens:
            embed(self, module, slice(words.start, words.stop - 1), tokens))]),
    Fault("queries, keys and values cut as one matrix", "bigcode Megatron-LM 35, torchtitan 3807", "gpt2", TENSOR,
          r"forward of h\.0",
          [(TensorParallel, "_replace", lambda cut, *args, groups=1, **named: cut(*args, **named))]),
    Fault("the same dropout on ranks that share heads", "pytorch 168058", "gpt2", TENSOR,
          r"forward of h\.0", [(TensorParallel, "_part_of", lambda *_: {})]),
    Fault("a tied gradient not summed", "Megatron-LM 1447, NeMo-RL 227", "gpt2", PIPE,
          r"gradient of embedding\.wte\.weight", [(Gradients, "finish", _not_copied)]),
    Fault("gradients summed over replicas", "", "gpt2", DDP,
          "gradient of ", [(Replicas, "finish_gradients", _scaled(2.0))]),
    Fault("gradients not averaged", "", "gpt2", DDP,
          "gradient of ", [(DistributedDataParallel, "forward", _not_synchronized)]),
    Fault("gradients added up in bf16", "", "llama", DDP,
          "gradient of ", [(Stage, "forward", _rounded_gradients)]),
    Fault("running statistics of one replica", "", "normed", DDP,
          r"buffers norm\.running", [(RunningStatistics, "__init__", _own_statistics)]),
    Fault("the balance of each replica's own tokens", "", "moe", EXPERT,
          r"backward of layers\.",
          [(AuxiliaryLosses, "__init__", _then(lambda self, _: setattr(self, "_alone", True)))]),
    Fault("gradients of experts divided twice", "", "moe", EXPERT,
          r"gradient of .*experts", [(Replicas, "finish_gradients", _scaled(0.5, lambda name: "experts" in name))]),
    Fault("the loss of the first replica shown", "torchtitan 3280, transformers 39674", "llama", DDP,
          "in (the )?loss",
          [(Strategy, "take_sums", _then(lambda self, sums: setattr(self, "shown", sums))),
           (Strategy, "_agree", _then(_first_replicas))]),
    Fault("an evaluation of the first replica's samples", "", "gpt2", DDP,
          "evaluation val_", [(Strategy, "eval_step", _then(lambda _, sums: sums * (_rank() == 0)))]),
]}  # fmt: skip


# -- verdicts ----------------------------------------------------------------------------------------------------------


@contextmanager
def reference(model: str, precision: str, folder: Path, seed: int = 0) -> Iterator[Runs]:
    """Run one process, and the runs that measure rounding. Layouts can be compared with them inside the block."""
    build, words = MODELS[model]
    objects = {"model": build(), "data": data(model, seed)}
    set_given(objects)
    try:
        cfg = with_given(load_config(
            "logger=none", "device=cpu", "parallel=single", "parallel.threads=1", "verify.steps=2",
            "verify.timeout_s=60", "verify.processes=2", "train.global_batch_size=8", f"train.precision={precision}",
            f"seed={seed}", *([] if model == "normed" else words), "train.grad_clip=null",
        ), objects)  # fmt: skip
        cfg = to_config(to_dict(cfg))
        setup = prepare(cfg)
        runs = Runs(cfg, folder / f"{model}-{precision}-{seed}", setup.chain, MICROBATCHES)
        for number in range(1 + PERTURBED * (precision != "fp64")):
            result = runs.compare(Layout(chunks=MICROBATCHES), None, number)
            assert result.holds, result.reason
        yield runs
    finally:
        set_given(None)
        shutil.rmtree(folder, ignore_errors=True)


def tried(fault: Fault, runs: Runs) -> tuple[Compared, bool]:
    """Compare the fault's layout. Return the comparison, and whether the fault is found and the culprit named."""
    with patch.object(verified, "_run_jobs", fault):
        result = runs.compare(fault.layout)
        if result.differences and not result.holds:
            result.reason = first_difference(runs, result, [])
    return result, result.holds is False and re.search(fault.says, result.reason) is not None
