"""Probes that find layers with results that depend on the layout, by running each layer on real samples.

Each layer is built as a separate stage and gets the output of the previous layer. No source code is inspected.
"""

from __future__ import annotations

import math
import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import brief
from common.machine import available_memory
from data.dataset import Batch, mapped
from launchers import Interrupted, stopping
from models.chain import CPU, LOSS, Chain, as_tuple, converted, is_within
from models.losses import loss_of
from parallel.devices import parameter_dtype
from parallel.examination import Examination, Facts, examine, reads_numbers
from parallel.stage import Stage
from planner.work import weights_of, work_of
from training.run.setup import Setup

_SAMPLES = 4
_FEW, _PAIR = slice(0, _SAMPLES), slice(0, 2)
# A layer that draws one random bit gives equal results in all these calls, and in two calls on _FEW, in one of 2,000
# verifications.
_DRAWS = 11
_PATIENCE_S = 60.0  # for batches that are larger than the batch to verify
_FLOOR = 1e-3  # as a fraction of the largest number of all tensors; smaller differences may be rounding
Tensors = Mapping[Any, Tensor | None]
Results = dict[str, dict[Any, Any]]
Found = Iterator[tuple[str, bool]]  # a sentence, and whether a rule of this project covers the case


@dataclass(frozen=True)
class Finding:
    """The result of a probe.

    Attributes:
        probe: The name of the probe.
        layer: The layer; empty for the whole model.
        text: The finding in a sentence; empty if nothing was found.
        holds: Whether all layouts train alike nevertheless, because a rule of this project covers the case.
    """

    probe: str
    layer: str = ""
    text: str = ""
    holds: bool = False

    def __str__(self) -> str:
        layer = f"layer {self.layer}: " if self.layer else ""
        return f"{self.probe:18} {layer}{self.text}".rstrip()


class Layer:
    """A layer in training or in evaluation, with its inputs.

    Attributes:
        stage: A stage with this layer alone.
        inputs: The layer's inputs, computed from ``samples``.
        samples: The samples.
        found: The facts of the whole chain in this mode.
        training: Whether the mode is training.
        facts: The facts of the layer.
        drawn: The names of the generators, Python's and numpy's, from which the layer has drawn.
        sizes: The sizes of the batches to compute at once.
        seen: The layer's results for the first samples.
        seconds: The layer's computing time per sample.
    """

    def __init__(
        self, stage: Stage, inputs: tuple[Tensor, ...], samples: Batch, found: Examination, training: bool
    ) -> None:
        """Run the layer on the first samples."""
        self.stage, self.inputs, self.samples, self.found, self.training = stage, inputs, samples, found, training
        (self.name,) = stage.layers.names
        self.module, self.mode = stage.layers[self.name], "training" if training else "evaluation"
        self.kind = f"{self.name} ({type(self.module).__name__})"
        self.loss = f"loss {type(self.module if loss_of(self.module) is not None else stage.chain.loss).__name__}"
        unknown = Facts(self.name, "", ())  # the examination ends at a layer that it cannot compute
        self.facts = next((facts for facts in found.layers if facts.name == self.name), unknown)
        self.drawn: set[str] = set()
        self.sizes: tuple[int, ...] = ()
        began = time.process_time()
        self.seen = self.run()
        self.seconds = (time.process_time() - began) / _SAMPLES

    def run(self, rows: slice = _FEW, backward: bool = True, state: int = 0) -> Results:
        """Compute some samples in step 1 or in evaluation.

        Python's and numpy's generators are seeded with ``state`` first.

        Returns:
            A dict with the outputs ("given"); the outputs and gradients of inputs that have a dimension of samples
            ("each"); the loss, its count and its metrics ("sums"); and the gradients of inputs and parameters
            ("gradients").
        """
        first, last, _ = rows.indices(len(self.samples))
        stage, where, count = self.stage, (first, last - first), last - first
        stage.zero_grad()
        stage.begin(self.training, step=int(self.training))
        inputs = self.rows(rows)
        with _generators(state, self.drawn):
            with torch.set_grad_enabled(self.training):
                outputs = as_tuple(stage(*inputs, samples=where))
            if parts := [_weighed(t, first, count) for t in outputs if t.requires_grad and backward]:
                torch.stack(parts).sum().backward()
            if stage.ends_chain:
                with torch.no_grad():
                    targets = mapped(lambda x: x[rows], self.samples.targets)
                    stage(*self.rows(rows), samples=where, targets=targets)
        stage.end()
        given = dict(enumerate(outputs))
        gradients = {f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
        every = gradients | {n: p.grad for n, p in self.module.named_parameters() if p.requires_grad and p.numel()}
        each = {k: t for k, t in (given | gradients).items() if t is not None and t.dim() and len(t) % count == 0}
        sums = {"sums": stage.take_sums()} if stage.ends_chain else {}
        return {"given": given, "each": each, "sums": sums, "gradients": every}

    def rows(self, rows: slice) -> tuple[Tensor, ...]:
        """Copy the inputs of some samples. An input without a dimension of samples is copied whole."""
        parts = [_of_samples(t, rows, len(self.samples)).detach().clone() for t in self.inputs]
        return tuple(p.requires_grad_(t.requires_grad) for p, t in zip(parts, self.inputs, strict=True))

    def rule(self) -> str | None:
        """Return the rule of this project that lets results depend on the micro-batch; None if they may not."""
        if self.training and any(isinstance(module, _BatchNorm) for module in self.module.modules()):
            return (
                "BatchNorm normalizes by the micro-batch: compare with parallel=single in micro-batches of the same "
                "size, or use parallel.sync_batchnorm=true"
            )
        drawing, ends = self.found.which("draws"), self.stage.ends_chain
        if self.name in drawing or (ends and LOSS in drawing):
            who = "" if self.name in drawing else f"{self.loss} "
            return f"{who}draws random numbers from torch's generator: seeded for each micro-batch"
        return "gathers the samples of all replicas" if ends and self.found.which("gathers") else None


def _weighed(output: Tensor, first: int, count: int) -> Tensor:
    """Return a weighted sum over an output, with a different weight for each sample and each of its numbers."""
    output = _real(output)
    rows = output.reshape(count if output.numel() % count == 0 else 1, -1)
    weights = torch.linspace(1, 2, rows.shape[1]) * torch.arange(first + 1, first + 1 + len(rows))[:, None]
    return (rows * weights).sum().double()


def _of_samples(tensor: Tensor, rows: slice, count: int) -> Tensor:
    """Return the part of a tensor for some of ``count`` samples. Without a sample dimension, return it whole."""
    each = len(tensor) // count if tensor.dim() > 0 and len(tensor) % count == 0 else 0
    first, last, _ = rows.indices(count)
    return tensor[first * each : last * each] if each else tensor


@contextmanager
def _generators(state: int, drawn: set[str]) -> Iterator[None]:
    """Seed Python's and numpy's generators, add the used ones to ``drawn``, and restore them when the block ends."""
    kept = random.getstate(), np.random.get_state()
    random.seed(state)
    np.random.seed(state)
    began = _states()
    try:
        yield
    finally:
        drawn.update(name for name, now in _states().items() if now != began[name])
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def _states() -> dict[str, bytes]:
    states = {"Python's generator": random.getstate(), "numpy's generator": np.random.get_state()}
    return {name: pickle.dumps(state) for name, state in states.items()}


def difference(ours: Tensor | None, theirs: Tensor | None, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest number of ``theirs``, or to ``floor`` if that is larger.

    If both are 0, the difference is absolute.
    """
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return 0.0 if ours is theirs else torch.inf
    if torch.equal(ours, theirs):
        return 0.0
    ours, theirs = _real(ours.detach()).double(), _real(theirs.detach()).double()
    gap = vector_norm(ours - theirs, math.inf).item()
    if not math.isfinite(gap):
        gap = (ours - theirs).nan_to_num(torch.inf).masked_fill(ours == theirs, 0.0).abs().max().item()
    return gap / (max(_largest(theirs), floor) or 1.0)


def differences(ours: Tensors, theirs: Tensors, least: float = _FLOOR) -> dict[Any, float]:
    """Return the relative difference of each tensor that differs, by its name.

    It is relative to the tensor's largest number, or to ``least`` times that of all tensors that differ.
    """
    pairs = ((name, ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs]))
    names = [name for name, a, b in pairs if a is None or b is None or a.shape != b.shape or not torch.equal(a, b)]
    # Equal tensors do not count: the -1e9 of a mask would hide all differences of the other tensors.
    changed = (t.detach() for name in names if (t := theirs.get(name)) is not None and t.numel() > 1)
    floor = least and least * max((_largest(_real(t).double()) for t in changed), default=0.0)
    return {name: difference(ours.get(name), theirs.get(name), floor) for name in names}


def largest_difference(ours: Tensors, theirs: Tensors) -> tuple[float, Any]:
    """Return the largest relative difference, and the name of the tensor with this difference."""
    return max(((size, name) for name, size in differences(ours, theirs).items()), key=itemgetter(0), default=(0.0, ""))


def _largest(numbers: Tensor) -> float:
    """Return the largest finite absolute value; 0 if there is none."""
    largest = vector_norm(numbers, math.inf).item()
    return largest if math.isfinite(largest) else numbers.abs().nan_to_num(0.0, 0.0).max().item()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _unchanged(layer: Layer, tolerance: float) -> Found:
    """Look for a parameter or buffer that each forward changes."""
    for name in layer.facts.changes[:1]:
        kind = "parameter" if name in dict(layer.module.named_parameters()) else "buffer"
        yield f"its forward changes its {kind} {name!r} in {layer.mode}, each replica and micro-batch its own", False


def _repeats(layer: Layer, tolerance: float) -> Found:
    """Compute the same samples several times, with different seeds of Python's and numpy's generators."""
    first, *others = (layer.run(_PAIR, backward=False, state=n) for n in range(_DRAWS))
    pairs = [(layer.run(state=1), layer.seen), *((other, first) for other in others)]
    size = max(largest_difference(*(seen["given"] | seen["sums"] for seen in pair))[0] for pair in pairs)
    if layer.drawn:
        numbers = f"numbers change by {size:.0e}" if size else f"{_DRAWS} draws changed no number"
        drawn = " and ".join(sorted(layer.drawn))
        yield f"draws from {drawn} in {layer.mode}, which no seed of a run sets ({numbers})", False
    elif size > tolerance:
        text = f"gives other numbers for the same input in {layer.mode}: it draws random numbers that are not torch's"
        yield f"{text}, or keeps something between calls (by {size:.0e})", False


def _outputs(layer: Layer, tolerance: float) -> Found:
    """Look for missing gradients."""
    outputs, gradients = layer.seen["given"].values(), layer.seen["gradients"] if layer.training else {}
    given = [gradient for name, gradient in gradients.items() if name.startswith("input ")]
    without = [name for name, g in gradients.items() if g is None and not name.startswith("input ")]
    if gradients and not any(t.requires_grad for t in outputs):
        yield "returns nothing that has a gradient: parameters in it and before it are not trained", False
    elif given and all(gradient is None for gradient in given):
        yield "gives its input no gradient: layers before it are not trained", False
    elif without:
        yield f"parameters without a gradient: {', '.join(without)}", True


def _halves(layer: Layer, tolerance: float) -> Found:
    """Compute each half of the samples separately, with its loss."""
    half, seen = _SAMPLES // 2, layer.seen
    # A layer may mix samples by a factor that is zero at first: then only gradients show it. They are those of sums
    # over samples, unless it returns something else.
    sums_up = not layer.facts.passes and all(i in seen["each"] for i, t in seen["given"].items() if t.requires_grad)
    first, second = (layer.run(rows, backward=sums_up) for rows in (slice(0, half), slice(half, _SAMPLES)))
    pairs = {i: (t, second["each"][i]) for i, t in first["each"].items() if i in seen["each"] | seen["given"]}
    joined = {i: torch.cat(pair) for i, pair in pairs.items()}
    whole = dict(seen["each"])
    if sums_up:
        joined[""], whole[""] = _of_parameters(layer, first, second), _of_parameters(layer, seen)
    sums = {name: t + second["sums"][name] for name, t in first["sums"].items()}
    others = f"samples see each other in {layer.mode}: half of a batch gives other numbers than the whole"
    loss = f"{layer.loss} of a batch is not the sum over its halves in {layer.mode}: give the sum of terms and their "
    for text, ours, theirs in ((others, joined, whole), (f"{loss}number", sums, seen["sums"])):
        size, _ = largest_difference(ours, {name: theirs.get(name) for name in ours})
        if size > tolerance:
            rule = layer.rule()
            yield f"{rule or text} (by {size:.0e})", rule is not None
    if layer.training and layer.facts.passes:
        yield "passes on a number of its micro-batch: results depend on its size", True


def _of_parameters(layer: Layer, *runs: Results) -> Tensor:
    """Return the gradients of a layer's parameters, added up over runs, [numbers]."""
    sums = [torch.zeros(1)]  # there may be no parameter
    for name, parameter in layer.module.named_parameters():
        own = (run["gradients"].get(name) for run in runs)
        sums.append(sum((t for t in own if t is not None), torch.zeros_like(parameter)).detach().flatten())
    return torch.cat(sums)


def _sizes(layer: Layer, tolerance: float) -> Found:
    """Compute larger batches than the other probes do."""
    for count in layer.sizes:
        batch = layer.run(slice(0, count))
        few = layer.seen["each"]
        ours = {k: _of_samples(t, _FEW, count) for k, t in batch["each"].items() if k in few}
        ours, theirs = ours | batch["sums"], {k: few[k] for k in ours}
        if batch["sums"]:
            parts = [slice(first, min(first + _SAMPLES, count)) for first in range(0, count, _SAMPLES)]
            theirs["sums"] = sum(layer.run(part, backward=False)["sums"]["sums"] for part in parts)
        size, _ = largest_difference(ours, theirs)
        if size > tolerance:
            text = f"gives a sample other numbers in a batch of {count} than in one of {_SAMPLES} in {layer.mode}"
            yield f"{text}: what it does depends on how many samples there are (by {size:.0e})", False


PROBES: dict[str, Callable[[Layer, float], Found]] = {
    "unchanged": _unchanged, "repeats": _repeats, "outputs": _outputs, "halves": _halves, "sizes": _sizes,
}  # fmt: skip


def probe(setup: Setup, own: int = 0) -> Iterator[Finding]:
    """Yield the findings of each probe in each layer. A probe without findings yields one finding without text.

    A layer with a finding of "unchanged", "repeats" or "halves" is not probed further, because other differences would
    follow from it. ``own`` is the micro-batch size of the run to verify. The probe "sizes" computes a batch of this
    size and a batch with all samples of a step.

    Raises:
        Interrupted: If this process was told to stop.
    """
    chain, tolerance = setup.chain, setup.cfg.verify.tolerance
    shapes = [str(reads_numbers(facts.name, facts.kind)) for facts in setup.examination.layers if facts.reads_numbers]
    size = setup.plan.microbatch_size
    works = weights_of(chain) if shapes else work_of(chain, setup.sample, setup.plan.precision, size)[0]
    # Only pipelines need the shapes, and a model of one layer does not run in a pipeline.
    said = shapes[0].partition(". ")[0] if shapes else ""
    yield Finding("shapes", text=said, holds=not shapes or len(chain.layers) == 1)
    shared = [Finding("shared parameters", *where) for where in _shared(chain)]
    yield from shared or [Finding("shared parameters", holds=True)]
    if shared:  # building one layer would change another
        return
    layers, too_large = _layers(setup, own, [work.kept for work in works])
    skipped: set[str] = set()
    for name, same in PROBES.items():
        found = {finding.text: finding for finding in too_large if name == "sizes"}
        for layer in (layer for layer in layers if layer.kind not in skipped):
            _check_stopped()
            try:
                texts = [*same(layer, tolerance)]
            except Exception as error:  # a user's code
                texts = [(f"some numbers of samples cannot be computed: {brief(error)}", False)]
            for text, holds in texts:  # of training and evaluation alike, once
                found.setdefault(layer.kind + text.partition(" (by ")[0], Finding(name, layer.kind, text, holds))
        if name in ("unchanged", "repeats", "halves"):
            skipped |= {finding.layer for finding in found.values()}
        yield from found.values() or [Finding(name, holds=True)]


def _layers(setup: Setup, own: int, kept: Sequence[float]) -> tuple[list[Layer], list[Finding]]:
    """Build every layer with its input, and find the batches that are too large for this machine.

    ``kept`` has the bytes that each layer keeps per sample for the backward; 0 if unknown.
    """
    chain, dtype, step = setup.chain, parameter_dtype(setup.plan.precision), setup.plan.microbatch_size
    found = [(setup.examination, True), (examine(chain, setup.sample, training=False), False)]
    sizes = sorted({size for size in (step, own) if size > _SAMPLES})
    indices = np.arange(max([_SAMPLES, *sizes]), dtype=np.int64) % len(setup.data.train)
    samples = Batch(*setup.data.train.read(indices, 0)).map(lambda t: converted(t, dtype))
    layers, too_large, inputs = [], [], samples.input_tensors
    for i, name in enumerate(chain.names):
        _check_stopped()
        try:
            stage = Stage(chain, [name], seed=setup.cfg.seed, device=CPU, dtype=dtype)
            layer, evaluated = (Layer(stage, inputs, samples, *each) for each in found)
        except Exception as error:  # a user's code
            text = f"{_SAMPLES} samples cannot be computed in {setup.plan.precision}: {brief(error)}"
            if "double" in text.lower():
                text += ". If the layer always computes in float32, verify it with train.precision=fp32"
            too_large.append(Finding("sizes", f"{name} ({type(chain.skeleton([name])[name]).__name__})", text))
            break
        each = kept[i] + 4 * sum(t.nbytes for t in layer.seen["given"].values()) / _SAMPLES
        while sizes:
            needed, seconds = sizes[-1] * each, 5 * sizes[-1] * evaluated.seconds
            if needed < available_memory() and (sizes[-1] == step or seconds < _PATIENCE_S / len(chain.names)):
                break
            text = f"no batch of {sizes[-1]} was computed from here on: it takes about {needed / 2**30:.1f} GiB and "
            too_large.append(Finding("sizes", layer.kind, f"{text}{seconds:.0f} s", holds=True))
            sizes.pop()
        layer.sizes = evaluated.sizes = tuple(sizes)
        layers += [layer, evaluated]
        count = max([_SAMPLES, *sizes])
        seen = layer.run(slice(0, count), backward=False) if sizes else layer.seen
        inputs = tuple(t.detach().requires_grad_(t.requires_grad) for t in seen["given"].values())
        samples = samples.map(lambda t, count=count: t[:count])
    return layers, too_large


def _check_stopped() -> None:
    """Raise Interrupted if this process was told to stop."""
    if (signum := stopping.noted()) is not None:
        raise Interrupted(signum)


def _shared(chain: Chain) -> Iterator[tuple[str, str]]:
    built = {}
    for spec in chain.layers:
        for name, own in spec.made().named_parameters(prefix=spec.name, remove_duplicate=False):
            first = built.setdefault(own, name)
            if not is_within(first, [spec.name]) and chain.canonical(name) != chain.canonical(first):
                text = f"{name} is {first}, and Chain.tied does not say so: each stage would train its own"
                yield spec.name, text
