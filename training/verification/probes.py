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
from models.chain import CPU, Chain, as_tuple, is_within
from parallel.devices import parameter_dtype
from parallel.shape_inference import drawing_by_microbatch, trace
from parallel.stage import Stage
from training.setup import Setup

_SAMPLES = 4
_RANDOM = "it draws random numbers that are not torch's, or keeps something between calls"


@dataclass(frozen=True)
class Finding:
    """What a probe has found.

    Attributes:
        probe: Its name.
        layer: The layer; empty for the whole model.
        text: What was found, in a sentence.
        size: The largest difference, relative to the largest number of the tensor; None where nothing was compared.
        fatal: Whether some layout would train otherwise. Else it is as this project has it, and worth knowing.
    """

    probe: str
    layer: str
    text: str
    size: float | None = None
    fatal: bool = True

    def __str__(self) -> str:
        size = "" if self.size is None else f" (by {self.size:.0e})"
        return f"{f'layer {self.layer}: ' if self.layer else ''}{self.text}{size}"


class Layer:
    """One layer, as a stage of its own, and what it gets."""

    def __init__(self, setup: Setup, name: str, inputs: tuple[Tensor, ...], samples: Batch, drawing: bool) -> None:
        self.setup, self.chain, self.name, self.inputs, self.drawing = setup, setup.chain, name, inputs, drawing
        self.samples, self.dtype = samples, parameter_dtype(setup.plan.precision)
        self.stage = Stage(setup.chain, [name], seed=setup.cfg.seed, device=CPU, dtype=self.dtype)
        self.module: nn.Module = self.stage.layers[name]
        self.norms = any(isinstance(module, _BatchNorm) for module in self.module.modules())

    @property
    def ends(self) -> bool:
        """Whether it is the last one."""
        return self.name == self.chain.names[-1]

    @property
    def kind(self) -> str:
        """Its name and its class."""
        return f"{self.name} ({type(self.module).__name__})"

    def run(
        self, training: bool, rows: slice = slice(None), given: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, ...]:
        """Return what the layer gives for some samples in step 1, or in evaluation."""
        first, last, _ = rows.indices(len(self.samples))
        self.stage.begin(training, step=1)
        inputs = self.rows(self.copies() if given is None else given, rows)
        with torch.set_grad_enabled(training):
            return as_tuple(self.stage(*inputs, samples=(first, last - first)))

    def sums(self, rows: slice, training: bool, weights: Tensor | None = None) -> Tensor:
        """Return [loss, count, metrics ...] of some samples."""
        first, last, _ = rows.indices(len(self.samples))
        self.stage.begin(training, step=1)
        with torch.no_grad():
            targets = self.samples.targets[rows]
            self.stage(*self.rows(self.copies(), rows), samples=(first, last - first), targets=targets, weights=weights)
        return self.stage.take_sums()

    def gradients(self, recompute: bool) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
        """Return the gradients of the inputs and of the parameters, of a sum that weighs each number otherwise."""
        self.stage.recompute = recompute
        self.stage.zero_grad()
        inputs = self.copies()
        try:
            outputs = self.run(True, given=inputs)
            parts = [(t * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for t in outputs if t.requires_grad]
            if parts:
                torch.stack([part.double() for part in parts]).sum().backward()
        finally:
            self.stage.recompute = False
            self.stage.end()
        return [t.grad for t in inputs], {name: p.grad for name, p in self.module.named_parameters()}

    def copies(self) -> tuple[Tensor, ...]:
        """Return copies of what the layer gets: it may write into them."""
        return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in self.inputs)

    def rows(self, tensors: tuple[Tensor, ...], rows: slice) -> tuple[Tensor, ...]:
        """Cut tensors by samples; one without a dimension of samples is passed on whole."""
        count, (first, last, _) = len(self.samples), rows.indices(len(self.samples))
        each = [len(t) // count if t.dim() > 0 and len(t) % count == 0 else 0 for t in tensors]
        return tuple(t[first * n : last * n] if n else t for t, n in zip(tensors, each, strict=True))

    def state(self) -> dict[str, Tensor]:
        """Return copies of all parameters and of the buffers but BatchNorm's, which are updated once per step."""
        norms = {id(b) for m in self.module.modules() if isinstance(m, StepBatchNorm) for b in m.buffers()}
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: t.detach().clone() for name, t in tensors.items() if id(t) not in norms}


def difference(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest number of ``theirs`` or at least to ``floor``."""
    if ours.shape != theirs.shape:
        return torch.inf
    if ours.numel() == 0 or torch.equal(ours, theirs):
        return 0.0
    ours, theirs = ours.detach().double(), theirs.detach().double()
    finite = theirs[theirs.isfinite()].abs()
    gap = (ours - theirs).nan_to_num(torch.inf).masked_fill(ours == theirs, 0.0).abs().max().item()
    return gap / max(finite.max().item() if len(finite) else 0.0, floor, 1e-300)


def _largest(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    return max((difference(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


_MODES = ((True, "training"), (False, "evaluation"))


def _unchanged(layer: Layer) -> Iterator[Finding]:
    for training, mode in _MODES:
        before = layer.state()
        layer.run(training)
        for name, now in layer.state().items():
            if not torch.equal(now, before[name]):
                kind = "parameter" if name in dict(layer.module.named_parameters()) else "buffer"
                text = f"its forward changes its {kind} {name!r} in {mode}, each replica and micro-batch its own"
                yield Finding("unchanged", layer.kind, text, difference(now, before[name]))


def _repeats(layer: Layer) -> Iterator[Finding]:
    for training, mode in _MODES:
        if size := _largest(layer.run(training), layer.run(training)):
            text = f"gives other numbers for the same input in {mode}: {_RANDOM}"
            yield Finding("repeats", layer.kind, text, size)


def _leaves_input(layer: Layer) -> Iterator[Finding]:
    given = tuple(t.detach() for t in layer.copies())
    layer.run(True, given=given)
    if size := _largest(given, layer.inputs):
        yield Finding("leaves its input", layer.kind, "writes into its input, which the layer before may need", size)


def _halves(layer: Layer) -> Iterator[Finding]:
    count = len(layer.samples)
    halves = slice(0, count // 2), slice(count // 2, count)
    for training, mode in _MODES if count > 1 else ():
        whole = layer.run(training)
        parts = [layer.run(training, rows) for rows in halves]
        for one, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            if one.dim() == 0 or len(one) % count:
                if difference(pieces[0], one) > layer.setup.cfg.verify.tolerance and training:
                    text = "passes on a number of its micro-batch: results depend on the micro-batch's size"
                    yield Finding("halves", layer.kind, text, fatal=False)
            elif (size := difference(torch.cat(pieces), one)) > layer.setup.cfg.verify.tolerance:
                known = training and (layer.norms or layer.drawing)
                if known and layer.norms:
                    text = (
                        "BatchNorm normalizes by the micro-batch: compare with parallel=single in micro-batches of the "
                        "same size, or use parallel.sync_batchnorm=true"
                    )
                elif known:
                    text = "draws random numbers by itself: seeded for each micro-batch, as the plan says"
                else:
                    text = f"samples see each other in {mode}: half of a batch gives other numbers than the whole"
                yield Finding("halves", layer.kind, text, size, fatal=not known)
                break


def _recomputes(layer: Layer) -> Iterator[Finding]:
    try:
        once, again = layer.gradients(recompute=False), layer.gradients(recompute=True)
    except RuntimeError as error:
        text = f"does not repeat under train.activation_checkpointing: {str(error).splitlines()[0]}"
        yield Finding("recomputation", layer.kind, text)
        return
    pairs = [*zip(once[0], again[0], strict=True), *((once[1][name], again[1][name]) for name in once[1])]
    size = max((difference(b, a) for a, b in pairs if a is not None and b is not None), default=0.0)
    if size > layer.setup.cfg.verify.tolerance:
        yield Finding("recomputation", layer.kind, "gives other gradients under train.activation_checkpointing", size)


def _outputs(layer: Layer) -> Iterator[Finding]:
    outputs, trained = layer.run(True), any(p.requires_grad for p in layer.module.parameters())
    for one in outputs:
        if one.is_floating_point() and one.dtype != layer.dtype:
            text = f"returns {_short(one.dtype)} where its parameters and inputs are {_short(layer.dtype)}"
            yield Finding("outputs", layer.kind, text)
            break
    leads = trained or any(t.requires_grad for t in layer.inputs)
    if leads and not any(t.requires_grad for t in outputs):
        text = "returns nothing that has a gradient: parameters in it and before it are not trained"
        yield Finding("outputs", layer.kind, text)
        return
    received, gradients = layer.gradients(recompute=False)
    lost = [i for i, t in enumerate(layer.inputs) if t.requires_grad and received[i] is None]
    if lost and len(lost) == sum(t.requires_grad for t in layer.inputs):
        yield Finding("outputs", layer.kind, "gives its input no gradient: layers before it are not trained")
    frozen = {name for name, p in layer.module.named_parameters() if not p.requires_grad or p.numel() == 0}
    if without := sorted(name for name, g in gradients.items() if g is None and name not in frozen):
        yield Finding("outputs", layer.kind, f"parameters without a gradient: {', '.join(without)}", fatal=False)


def _loss(layer: Layer) -> Iterator[Finding]:
    if not layer.ends:
        return
    loss, count, tolerance = layer.chain.loss, len(layer.samples), layer.setup.cfg.verify.tolerance
    name = f"loss {type(layer.module if hasattr(layer.module, 'loss') else loss).__name__}"
    for training, mode in _MODES if count > 1 else ():
        whole = layer.sums(slice(None), training)
        halves = layer.sums(slice(0, count // 2), training) + layer.sums(slice(count // 2, count), training)
        if (size := difference(halves, whole)) > tolerance:
            known = training and (layer.norms or layer.drawing)
            text = f"{name} of a batch is not the sum over its halves in {mode}: give the sum of terms and their number"
            yield Finding("loss", layer.kind, text, size, fatal=not known)
    if count > 1:
        weights = torch.ones(count).to(layer.dtype)
        weights[-1] = 0.0
        size = difference(layer.sums(slice(None), False, weights), layer.sums(slice(0, count - 1), False))
        if size > tolerance and not layer.norms:
            text = f"{name} counts samples of weight 0, by which evaluation fills up its last batch"
            yield Finding("loss", layer.kind, text, size)


def _initial(layer: Layer) -> Iterator[Finding]:
    chain, seed = layer.chain, layer.setup.cfg.seed
    torch.rand(7)  # another place in torch's own sequence
    after = [name for name in chain.names if name != layer.name][:1]
    for names in ([layer.name], [*after, layer.name]):
        again = dict(chain.build(names, seed, CPU, layer.dtype).named_parameters(remove_duplicate=False))
        for name, own in layer.stage.layers.named_parameters(remove_duplicate=False):
            if size := difference(again[name], own):
                text = f"initial numbers of {name} depend on what was built before: draw them from torch's generator"
                yield Finding("initial weights", layer.kind, text, size)
                return


PROBES: dict[str, Callable[[Layer], Iterator[Finding]]] = {
    "unchanged": _unchanged,
    "repeats": _repeats,
    "leaves its input": _leaves_input,
    "halves": _halves,
    "recomputation": _recomputes,
    "loss": _loss,
    "outputs": _outputs,
    "initial weights": _initial,
}


def probe(setup: Setup) -> Iterator[tuple[str, list[Finding]]]:
    """Yield each probe's name and what it has found, in all layers.

    A layer in which "unchanged" or "repeats" has found something is not probed on: what else differs would follow.
    """
    samples = _samples(setup)
    yield "shapes", list(_shapes(setup))
    yield "shared parameters", list(_shared(setup.chain))
    drawing = drawing_by_microbatch(setup.chain, setup.sample)
    layers, inputs = [], samples.input_tensors
    for name in setup.chain.names:
        layer = Layer(setup, name, inputs, samples, name in drawing)
        layers.append(layer)
        outputs = layer.run(True)
        inputs = tuple(t.detach().requires_grad_(t.requires_grad) for t in outputs)
    for name, function in PROBES.items():
        found, sound = [], []
        for layer in layers:
            new = list(function(layer))
            found += new
            if not (new and name in ("unchanged", "repeats")):
                sound.append(layer)
        layers = sound
        yield name, found


def _samples(setup: Setup) -> Batch:
    source, dtype = setup.data.train, parameter_dtype(setup.plan.precision)
    batch = Batch(*source.read(np.arange(min(_SAMPLES, len(source)), dtype=np.int64), 0))
    return batch.map(lambda t: t.to(dtype) if t.is_floating_point() else t)


def _shapes(setup: Setup) -> Iterator[Finding]:
    try:
        trace(setup.chain, setup.sample, setup.plan.precision, "cpu")
    except PlanError as error:
        yield Finding("shapes", "", str(error).partition(". ")[0])


def _shared(chain: Chain) -> Iterator[Finding]:
    built: dict[Any, str] = {}
    for spec in chain.layers:
        for name, own in spec.made().named_parameters(prefix=spec.name, remove_duplicate=False):
            first = built.setdefault(own, name)
            same = is_within(first, [spec.name]) or chain.canonical(name) == chain.canonical(first)
            if first != name and not same:
                text = f"{name} is {first}, and Chain.tied does not say so: each stage would train its own"
                yield Finding("shared parameters", spec.name, text)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
