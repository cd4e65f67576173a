"""What in a model would make its results depend on the layout: each layer is run on real samples and measured.

Each layer is a stage of its own and gets what the layer before it gave. Nothing here reads source code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import PlanError
from data.dataset import Batch
from models.batchnorm import StepBatchNorm
from models.chain import CPU, as_tuple, is_within
from parallel.devices import parameter_dtype
from parallel.shape_inference import drawing_by_microbatch, trace
from parallel.stage import Stage
from training.setup import Setup

_SAMPLES, _ALL = 4, slice(None)
_MODES = ((True, "training"), (False, "evaluation"))
Found = Iterator[tuple[Any, ...]]  # text, size and holds of each finding


@dataclass(frozen=True)
class Finding:
    """What a probe has found.

    Attributes:
        probe: Its name.
        layer: The layer; empty for the whole model.
        text: What was found, in a sentence; empty where nothing was.
        size: The largest difference, relative to the largest number of the tensor; None where nothing was compared.
        holds: Whether all layouts train alike nevertheless: it is a rule of this project, and worth knowing.
    """

    probe: str
    layer: str = ""
    text: str = ""
    size: float | None = None
    holds: bool = False

    def __str__(self) -> str:
        layer = f"layer {self.layer}: " if self.layer else ""
        return f"{self.probe:18} {layer}{self.text}" + (f" (by {self.size:.0e})" if self.size else "")


@dataclass(frozen=True)
class Seen:
    """What a layer has done with some samples: in training, ``gradients`` of inputs and parameters by name.

    ``inputs`` are as the layer leaves them; ``sums``: [loss, count, metrics ...] of the last layer.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    sums: Tensor | None
    gradients: dict[str, Tensor | None]


class Layer:
    """One layer, as a stage of its own, and what it gets."""

    def __init__(self, setup: Setup, name: str, inputs: tuple[Tensor, ...], samples: Batch, drawing: bool) -> None:
        self.setup, self.name, self.inputs, self.samples, self.drawing = setup, name, inputs, samples, drawing
        self.dtype, self.tolerance = parameter_dtype(setup.plan.precision), setup.cfg.verify.tolerance
        self.stage = Stage(setup.chain, [name], seed=setup.cfg.seed, device=CPU, dtype=self.dtype)
        self.module: nn.Module = self.stage.layers[name]
        self.kind = f"{name} ({type(self.module).__name__})"
        self.norms = any(isinstance(module, _BatchNorm) for module in self.module.modules())
        self.seen: dict[bool, Seen] = {}
        self.changed: list[tuple[str, float]] = []
        for training, mode in _MODES:
            before = self.state()
            self.seen[training] = self.run(training)
            sizes = {f"{name} in {mode}": difference(now, before[name]) for name, now in self.state().items()}
            self.changed += [(name, size) for name, size in sizes.items() if size]

    def run(
        self, training: bool, rows: slice = slice(None), weights: Tensor | None = None, again: bool = False
    ) -> Seen:
        """Compute some samples in step 1 or in evaluation; with ``again``, activations are recomputed."""
        first, last, _ = rows.indices(len(self.samples))
        stage, where = self.stage, (first, last - first)
        stage.recompute = again
        stage.zero_grad()
        stage.begin(training, step=1)
        inputs = self.rows(rows)
        with torch.set_grad_enabled(training):
            outputs = as_tuple(stage(*inputs, samples=where))
        parts = [(t * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for t in outputs if t.requires_grad]
        if parts:
            torch.stack([part.double() for part in parts]).sum().backward()
        stage.recompute = False
        if stage.ends_chain:
            with torch.no_grad():
                stage(*self.rows(rows), samples=where, targets=self.samples.targets[rows], weights=weights)
        stage.end()
        gradients = {f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
        gradients |= {name: p.grad for name, p in self.module.named_parameters() if p.requires_grad and p.numel()}
        return Seen(inputs, outputs, stage.take_sums(), gradients)

    def halves(self, training: bool) -> list[Seen]:
        """Compute the first half of the samples and the second."""
        middle = len(self.samples) // 2
        return [self.run(training, rows) for rows in (slice(0, middle), slice(middle, None))]

    def rows(self, rows: slice) -> tuple[Tensor, ...]:
        """Copy what some samples are of the inputs; an input without a dimension of samples is passed on whole."""
        count, (first, last, _) = len(self.samples), rows.indices(len(self.samples))
        each = [len(t) // count if t.dim() > 0 and len(t) % count == 0 else 0 for t in self.inputs]
        parts = [t[first * n : last * n] if n else t for t, n in zip(self.inputs, each, strict=True)]
        return tuple(
            p.detach().clone().requires_grad_(t.requires_grad) for p, t in zip(parts, self.inputs, strict=True)
        )

    def state(self) -> dict[str, Tensor]:
        """Return copies of all parameters and of the buffers but BatchNorm's, which are updated once per step."""
        norms = {id(b) for m in self.module.modules() if isinstance(m, StepBatchNorm) for b in m.buffers()}
        tensors = {f"parameter {name!r}": t for name, t in self.module.named_parameters()}
        tensors |= {f"buffer {name!r}": t for name, t in self.module.named_buffers() if id(t) not in norms}
        return {name: t.detach().clone() for name, t in tensors.items()}

    def known(self, training: bool) -> str | None:
        """Return why results depend on the micro-batch, where that is a rule of this project."""
        if training and self.norms:
            return (
                "BatchNorm normalizes by the micro-batch: compare with parallel=single in micro-batches of the same "
                "size, or use parallel.sync_batchnorm=true"
            )
        return "draws random numbers by itself: seeded for each micro-batch" if training and self.drawing else None


def difference(ours: Tensor | None, theirs: Tensor | None, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest number of ``theirs`` or at least to ``floor``."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return 0.0 if ours is theirs else torch.inf
    if torch.equal(ours, theirs):
        return 0.0
    ours, theirs = ours.detach().double(), theirs.detach().double()
    gap = (ours - theirs).nan_to_num(torch.inf).masked_fill(ours == theirs, 0.0).abs().max().item()
    return gap / max(theirs.abs().nan_to_num(0.0, 0.0).max().item(), floor, 1e-300)


def _unchanged(layer: Layer) -> Found:
    for name, size in layer.changed:
        yield f"its forward changes its {name}, each replica and micro-batch its own", size


def _repeats(layer: Layer) -> Found:
    for training, mode in _MODES:
        once, again = layer.seen[training], layer.run(training)
        if size := max(map(difference, (*again.outputs, again.sums), (*once.outputs, once.sums))):
            yield (
                f"gives other numbers for the same input in {mode}: it draws random numbers that are not torch's, or "
                "keeps something between calls",
                size,
            )


def _leaves_input(layer: Layer) -> Found:
    if size := max(map(difference, layer.seen[True].inputs, layer.inputs), default=0.0):
        yield "writes into its input, which the layer before may need", size


def _halves(layer: Layer) -> Found:
    count = len(layer.samples)
    for training, mode in _MODES if count > 1 else ():
        pieces = zip(*(half.outputs for half in layer.halves(training)), strict=True)
        for whole, parts in zip(layer.seen[training].outputs, pieces, strict=True):
            by_sample = whole.dim() > 0 and len(whole) % count == 0
            size = difference(torch.cat(parts) if by_sample else parts[0], whole)
            if size <= layer.tolerance or not (training or by_sample):
                continue
            if by_sample:
                sees = f"samples see each other in {mode}: half of a batch gives other numbers than the whole"
                known = layer.known(training)
                yield known or sees, size, known is not None
            else:
                yield "passes on a number of its micro-batch: results depend on the micro-batch's size", size, True
            break


def _recomputes(layer: Layer) -> Found:
    try:
        once, again = layer.seen[True].gradients, layer.run(True, again=True).gradients
    except RuntimeError as error:
        yield f"does not repeat under train.activation_checkpointing: {str(error).splitlines()[0]}", None
        return
    if (size := max((difference(again[name], once[name]) for name in once), default=0.0)) > layer.tolerance:
        yield "gives other gradients under train.activation_checkpointing", size


def _loss(layer: Layer) -> Found:
    if (count := len(layer.samples)) < 2 or not layer.stage.ends_chain:
        return
    loss = layer.module if hasattr(layer.module, "loss") else layer.stage.chain.loss
    name = f"loss {type(loss).__name__}"
    for training, mode in _MODES:
        parts = sum(half.sums for half in layer.halves(training))
        if (size := difference(parts, layer.seen[training].sums)) > layer.tolerance:
            text = f"{name} of a batch is not the sum over its halves in {mode}: give the sum of terms and their number"
            yield text, size, layer.known(training) is not None
    weights = torch.ones(count, dtype=layer.dtype)
    weights[-1] = 0.0
    size = difference(layer.run(False, weights=weights).sums, layer.run(False, slice(0, count - 1)).sums)
    if size > layer.tolerance and not layer.norms:
        yield f"{name} counts samples of weight 0, by which evaluation fills up its last batch", size


def _outputs(layer: Layer) -> Found:
    seen, dtype = layer.seen[True], layer.dtype
    others = [t.dtype for t in seen.outputs if t.is_floating_point() and t.dtype != dtype]
    if others:
        got, wanted = (str(one).removeprefix("torch.") for one in (others[0], dtype))
        yield f"returns {got} where its parameters and inputs are {wanted}", None
    given = [gradient for name, gradient in seen.gradients.items() if name.startswith("input ")]
    if seen.gradients and not any(t.requires_grad for t in seen.outputs):
        yield "returns nothing that has a gradient: parameters in it and before it are not trained", None
        return
    if given and all(gradient is None for gradient in given):
        yield "gives its input no gradient: layers before it are not trained", None
    if without := [name for name, g in seen.gradients.items() if g is None and not name.startswith("input ")]:
        yield f"parameters without a gradient: {', '.join(without)}", None, True


def _initial(layer: Layer) -> Found:
    chain, seed = layer.stage.chain, layer.setup.cfg.seed
    torch.rand(7)  # another place in torch's own sequence
    after = [name for name in chain.names if name != layer.name][:1]
    for names in ([layer.name], [*after, layer.name]):
        again = dict(chain.build(names, seed, CPU, layer.dtype).named_parameters(remove_duplicate=False))
        for name, own in layer.stage.layers.named_parameters(remove_duplicate=False):
            if size := difference(again[name], own):
                yield (
                    f"initial numbers of {name} depend on what was built before: draw them from torch's generator",
                    size,
                )
                return


PROBES: dict[str, Callable[[Layer], Found]] = {
    "unchanged": _unchanged,
    "repeats": _repeats,
    "leaves its input": _leaves_input,
    "halves": _halves,
    "recomputation": _recomputes,
    "loss": _loss,
    "outputs": _outputs,
    "initial weights": _initial,
}


def probe(setup: Setup) -> Iterator[Finding]:
    """Yield what each probe has found in each layer; for one that has found nothing, a finding without text.

    A layer in which "unchanged" or "repeats" has found something is not probed on: what else differs would follow.
    """
    chain, dtype = setup.chain, parameter_dtype(setup.plan.precision)
    for name, whole in (("shapes", _shapes), ("shared parameters", _shared)):
        yield from list(whole(setup)) or [Finding(name, holds=True)]
    drawing = drawing_by_microbatch(chain, setup.sample)
    indices = np.arange(min(_SAMPLES, len(setup.data.train)), dtype=np.int64)
    samples = Batch(*setup.data.train.read(indices, 0)).map(lambda t: t.to(dtype) if t.is_floating_point() else t)
    layers, inputs = [], samples.input_tensors
    for name in chain.names:
        layers.append(Layer(setup, name, inputs, samples, name in drawing))
        inputs = layers[-1].seen[True].outputs
    for name, function in PROBES.items():
        found = {layer: [Finding(name, layer.kind, *one) for one in function(layer)] for layer in layers}
        if name in ("unchanged", "repeats"):
            layers = [layer for layer in layers if not found[layer]]
        yield from [one for findings in found.values() for one in findings] or [Finding(name, holds=True)]


def _shapes(setup: Setup) -> Iterator[Finding]:
    try:
        trace(setup.chain, setup.sample, setup.plan.precision, "cpu")
    except PlanError as error:
        yield Finding("shapes", "", str(error).partition(". ")[0])


def _shared(setup: Setup) -> Iterator[Finding]:
    chain, built = setup.chain, {}
    for spec in chain.layers:
        for name, own in spec.made().named_parameters(prefix=spec.name, remove_duplicate=False):
            first = built.setdefault(own, name)
            if not is_within(first, [spec.name]) and chain.canonical(name) != chain.canonical(first):
                text = f"{name} is {first}, and Chain.tied does not say so: each stage would train its own"
                yield Finding("shared parameters", spec.name, text)
