"""Finds what would make a model's results depend on the layout, by running each layer on real samples.

Each layer is built as a separate stage and gets the output of the layer before it. No source code is inspected.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import PlanError
from common.machine import available_memory
from data.dataset import Batch
from launchers import Interrupted, stopping
from models.batchnorm import StepBatchNorm
from models.chain import CPU, LOSS, Chain, as_tuple, converted, is_within
from models.losses import loss_of
from parallel.devices import parameter_dtype
from parallel.examination import Examination, examine
from parallel.shape_inference import trace
from parallel.stage import Stage
from training.run.setup import Setup

_SAMPLES = 4
_FEW, _PAIR = slice(0, _SAMPLES), slice(0, 2)
# A layer that flips a coin gives the same in all of these calls, and in two of _FEW, in one of 2,000 verifications.
_DRAWS = 11
_PATIENCE_S = 60.0  # what batches above the verified one may take
_MODES = TRAINING, EVALUATION = "training", "evaluation"
_FLOOR = 1e-3  # what is below this part of the largest of all tensors may be rounding alone
Tensors = Mapping[Any, Tensor | None]
Cut = Mapping[bool, Examination]


@dataclass(frozen=True)
class Finding:
    """The result of a probe.

    Attributes:
        probe: The name of the probe.
        layer: The layer; empty for the whole model.
        text: The finding in a sentence; empty if nothing was found.
        holds: Whether all layouts train alike nevertheless, because this project has a rule for the case.
    """

    probe: str
    layer: str = ""
    text: str = ""
    holds: bool = False

    def __str__(self) -> str:
        layer = f"layer {self.layer}: " if self.layer else ""
        return f"{self.probe:18} {layer}{self.text}".rstrip()


class Layer:
    """A layer, built as a separate stage, with its inputs.

    What it does is kept by kind and name. What it has "given" are "outputs" or, without a dimension of samples,
    "numbers"; "sums" are the loss with its count and metrics.
    """

    def __init__(self, setup: Setup, name: str, inputs: tuple[Tensor, ...], samples: Batch, cut: Cut) -> None:
        """Build the layer and run it on the first of ``samples``, from which ``inputs`` were computed.

        ``cut`` is what depends on the micro-batch in training, and in evaluation.
        """
        self.chain, self.name, self.inputs, self.samples, self.cut = setup.chain, name, inputs, samples, cut
        self.seed, self.dtype = setup.cfg.seed, parameter_dtype(setup.plan.precision)
        self.stage = Stage(self.chain, [name], seed=self.seed, device=CPU, dtype=self.dtype)
        self.module: nn.Module = self.stage.layers[name]
        loss = self.module if loss_of(self.module) is not None else self.chain.loss
        self.loss, self.kind = f"loss {type(loss).__name__}", f"{name} ({type(self.module).__name__})"
        self.norms = any(isinstance(module, _BatchNorm) for module in self.module.modules())
        self.sizes: tuple[int, ...] = ()  # of batches to compute in one go
        self.drawn: dict[bool, set[str]] = {True: set(), False: set()}
        self.before = {True: self.state()}
        self.seen = {True: self.run(True)}
        self.after = {True: self.state()}
        began = time.process_time()
        self.seen[False] = self.run(False)
        self.seconds = (time.process_time() - began) / _SAMPLES  # of a sample's forward
        self.before[False], self.after[False] = self.after[True], self.state()

    def run(
        self,
        training: bool,
        rows: slice = _FEW,
        again: bool = False,
        backward: bool = True,
        state: int = 0,
    ) -> dict:
        """Compute some samples in step 1 or in evaluation; with ``again``, activations are recomputed.

        Python's and numpy's generators are in the state number ``state``: it alone decides what is drawn from them.
        """
        with _generators(state, self.drawn[training]):
            return self._run(training, rows, again, backward)

    def _run(self, training: bool, rows: slice, again: bool, backward: bool) -> dict:
        first, last, _ = rows.indices(len(self.samples))
        stage, where = self.stage, (first, last - first)
        stage.recompute = again
        stage.zero_grad()
        stage.begin(training, step=int(training))
        inputs = self.rows(rows)
        with torch.set_grad_enabled(training):
            outputs = as_tuple(stage(*inputs, samples=where))
        if parts := [_weighed(t, last - first) for t in outputs if t.requires_grad and backward]:
            torch.stack(parts).sum().backward()
        stage.recompute = False
        if stage.ends_chain:
            with torch.no_grad():
                stage(*self.rows(rows), samples=where, targets=self.samples.targets[rows])
        stage.end()
        seen: dict[str, Tensors] = {"inputs": dict(enumerate(inputs)), "given": dict(enumerate(outputs))}
        seen["outputs"] = {i: t for i, t in enumerate(outputs) if t.dim() and len(t) % (last - first) == 0}
        seen["numbers"] = {i: t for i, t in enumerate(outputs) if i not in seen["outputs"]}
        seen["sums"] = {"sums": stage.take_sums()} if stage.ends_chain else {}
        gradients = {f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
        gradients |= {n: p.grad for n, p in self.module.named_parameters() if p.requires_grad and p.numel()}
        return {**seen, "gradients": gradients}

    @cached_property
    def halves(self) -> dict[bool, list[dict]]:
        """The results for each half of the samples, in training and in evaluation."""
        rows = slice(0, _SAMPLES // 2), slice(_SAMPLES // 2, _SAMPLES)
        return {training: [self.run(training, half) for half in rows] for training in (True, False)}

    def joined(self, training: bool, kind: str) -> tuple[Tensors, Tensors]:
        """Return the joined results of both halves, and the results of all samples."""
        (first, second), whole = (half[kind] for half in self.halves[training]), self.seen[training][kind]
        return {i: first[i] + second[i] if kind == "sums" else torch.cat([first[i], second[i]]) for i in first}, whole

    def rows(self, rows: slice) -> tuple[Tensor, ...]:
        """Copy what some samples are of the inputs; an input without a dimension of samples is passed on whole."""
        parts = [_of_samples(t, rows, len(self.samples)).detach().clone() for t in self.inputs]
        return tuple(p.requires_grad_(t.requires_grad) for p, t in zip(parts, self.inputs, strict=True))

    def in_batch(self, training: bool, count: int) -> tuple[Tensors, Tensors]:
        """Return the results of the first samples in a batch of ``count`` and alone, with the whole batch's sums."""
        batch, few = self.run(training, slice(0, count)), self.seen[training]
        whole = {**batch["outputs"], **_gradients_by_sample(batch, count)}
        alone = {**few["outputs"], **_gradients_by_sample(few, _SAMPLES)}
        ours = {name: _of_samples(whole[name], _FEW, count) for name in whole if name in alone}
        theirs = {name: alone[name] for name in ours}
        if batch["sums"]:
            parts = [slice(first, min(first + _SAMPLES, count)) for first in range(0, count, _SAMPLES)]
            sums = [self.run(training, part, backward=False)["sums"]["sums"] for part in parts]
            ours, theirs = ours | batch["sums"], theirs | {"sums": torch.stack(sums).sum(dim=0)}
        return ours, theirs

    def state(self) -> Tensors:
        """Return copies of all parameters and of the buffers but BatchNorm's, which are updated once per step."""
        norms = {id(b) for m in self.module.modules() if isinstance(m, StepBatchNorm) for b in m.buffers()}
        tensors = {f"parameter {name!r}": t for name, t in self.module.named_parameters()}
        tensors |= {f"buffer {name!r}": t for name, t in self.module.named_buffers() if id(t) not in norms}
        return {name: t.detach().clone() for name, t in tensors.items()}

    def parameters(self, *names: str) -> Tensors:
        """Return the layer's parameters when these layers are built, at another position of torch's random sequence."""
        torch.rand(7)
        parameters = self.chain.build(names, self.seed, CPU, self.dtype).named_parameters(remove_duplicate=False)
        return {name: parameter for name, parameter in parameters if is_within(name, [self.name])}

    def rule(self, training: bool) -> str | None:
        """Return the rule of this project by which its results depend on the micro-batch in a mode."""
        if self.norms and training:
            return (
                "BatchNorm normalizes by the micro-batch: compare with parallel=single in micro-batches of the same "
                "size, or use parallel.sync_batchnorm=true"
            )
        drawing, ends = self.cut[training].which("draws"), self.stage.ends_chain
        if self.name in drawing or (ends and LOSS in drawing):
            who = "" if self.name in drawing else f"{self.loss} "
            return f"{who}draws random numbers from torch's generator: seeded for each micro-batch"
        return "gathers the samples of all replicas" if ends and self.cut[training].which("gathers") else None


def _weighed(output: Tensor, count: int) -> Tensor:
    """Return a sum over an output in which each number of a sample has a different weight."""
    output = _real(output)
    rows = output.reshape(count if output.numel() % count == 0 else 1, -1)
    return (rows * torch.linspace(1, 2, rows.shape[1])).sum().double()


def _of_samples(tensor: Tensor, rows: slice, count: int) -> Tensor:
    """Return the part of a tensor for some of ``count`` samples, or all of it if it has no sample dimension."""
    each = len(tensor) // count if tensor.dim() > 0 and len(tensor) % count == 0 else 0
    first, last, _ = rows.indices(count)
    return tensor[first * each : last * each] if each else tensor


def _gradients_by_sample(seen: dict, count: int) -> dict[str, Tensor]:
    """Return the gradients of the inputs with a sample dimension. Those of other inputs add up over the batch."""
    gradients = ((name, g) for name, g in seen["gradients"].items() if name.startswith("input ") and g is not None)
    return {name: g for name, g in gradients if g.dim() and len(g) % count == 0}


@contextmanager
def _generators(state: int, drawn: set[str]) -> Iterator[None]:
    """Set the state of Python's and numpy's generators, note in ``drawn`` which were used, and restore them."""
    kept = random.getstate(), np.random.get_state()
    random.seed(state)
    np.random.seed(state)
    began = _states()
    try:
        yield
    finally:
        now = _states()
        drawn.update(name for name in began if now[name] != began[name])
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def _states() -> dict[str, tuple]:
    numpys = np.random.get_state(legacy=False)
    key, place = numpys["state"]["key"].tobytes(), numpys["state"]["pos"]
    return {
        "Python's generator": random.getstate(),
        "numpy's generator": (key, place, numpys["has_gauss"], numpys["gauss"]),
    }


def difference(ours: Tensor | None, theirs: Tensor | None, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest number of ``theirs`` or at least to ``floor``.

    If both are 0, the difference is absolute.
    """
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return 0.0 if ours is theirs else torch.inf
    if torch.equal(ours, theirs):
        return 0.0
    ours, theirs = _real(ours.detach()).double(), _real(theirs.detach()).double()
    gap = (ours - theirs).nan_to_num(torch.inf).masked_fill(ours == theirs, 0.0).abs().max().item()
    return gap / (max(theirs.abs().nan_to_num(0.0, 0.0).max().item(), floor) or 1.0)


def largest_difference(ours: Tensors, theirs: Tensors) -> tuple[float, Any]:
    """Return the largest relative difference, and the name of its tensor."""
    pairs = ((name, ours.get(name), theirs.get(name)) for name in dict.fromkeys([*ours, *theirs]))
    names = [name for name, a, b in pairs if a is None or b is None or a.shape != b.shape or not torch.equal(a, b)]
    # Equal tensors do not count: the -1e9 of a mask would hide all differences of the others.
    changed = [t.detach() for name in names if (t := theirs.get(name)) is not None and t.numel() > 1]
    tensors = [_real(t).double().abs() for t in changed]
    floor = _FLOOR * max((t.nan_to_num(0.0, 0.0).max().item() for t in tensors), default=0.0)
    found = [(difference(ours.get(name), theirs.get(name), floor), name) for name in names]
    return max(found, key=lambda pair: pair[0], default=(0.0, ""))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class Same:
    """A probe: two ways to compute the same result, in training and in evaluation.

    Attributes:
        text: What a difference means.
        pair: Computes both results.
        rule: Returns the rule of this project by which they differ in training, if there is one.
        modes: The modes in which they are compared.
    """

    text: str
    pair: Callable[[Layer, bool], tuple[Tensors, Tensors]]
    rule: Callable[[Layer, bool], str | None] = lambda layer, training: None
    modes: Sequence[str] = _MODES

    def __call__(self, layer: Layer, tolerance: float) -> Iterator[tuple[str, bool]]:
        """Yield the sentence of each mode that differs, and whether that is by a rule."""
        for mode in self.modes:
            training = mode == TRAINING
            try:
                size, what = largest_difference(*self.pair(layer, training))
            except RuntimeError as error:
                yield f"{self.text.format(what='', mode=mode, loss='')}: {_first_line(error)}", False
                continue
            if size > tolerance:
                rule = self.rule(layer, training)
                text = rule or self.text.format(what=what, mode=mode, loss=layer.loss)
                yield f"{text} (by {size:.0e})", rule is not None


def _outputs(layer: Layer, tolerance: float) -> Iterator[tuple[str, bool]]:
    """Probe dtypes, and which gradients exist."""
    seen = layer.seen[True]
    outputs = seen["given"].values()
    if half := [t.dtype for t in outputs if t.is_floating_point() and t.dtype.itemsize < 4]:
        got, wanted = (str(dtype).removeprefix("torch.") for dtype in (half[0], layer.dtype))
        yield f"returns {got} where its parameters and inputs are {wanted}", False
    given = [gradient for name, gradient in seen["gradients"].items() if name.startswith("input ")]
    without = [name for name, g in seen["gradients"].items() if g is None and not name.startswith("input ")]
    if seen["gradients"] and not any(t.requires_grad for t in outputs):
        yield "returns nothing that has a gradient: parameters in it and before it are not trained", False
    elif given and all(gradient is None for gradient in given):
        yield "gives its input no gradient: layers before it are not trained", False
    elif without:
        yield f"parameters without a gradient: {', '.join(without)}", True


def _repeats(layer: Layer, tolerance: float) -> Iterator[tuple[str, bool]]:
    """Compute the same again, with Python's and numpy's generators in other states."""
    for mode in _MODES:
        training = mode == TRAINING
        pairs = [(layer.run(training, state=1), layer.seen[training])]
        first, *others = (layer.run(training, _PAIR, backward=False, state=n) for n in range(_DRAWS))
        pairs += [(other, first) for other in others]
        size = max(largest_difference(*(seen["given"] | seen["sums"] for seen in pair))[0] for pair in pairs)
        if drawn := layer.drawn[training]:
            numbers = f"numbers change by {size:.0e}" if size else f"{_DRAWS} draws changed no number"
            yield f"draws from {' and '.join(sorted(drawn))} in {mode}, which no seed of a run sets ({numbers})", False
        elif size > tolerance:
            text = f"gives other numbers for the same input in {mode}: it draws random numbers that are not torch's, or"
            yield f"{text} keeps something between calls (by {size:.0e})", False


def _sizes(layer: Layer, tolerance: float) -> Iterator[tuple[str, bool]]:
    """Compute samples together with more others than the other probes do."""
    for mode in _MODES:
        for count in layer.sizes:
            size, _ = largest_difference(*layer.in_batch(mode == TRAINING, count))
            if size > tolerance:
                text = f"gives a sample other numbers in a batch of {count} than in one of {_SAMPLES} in {mode}"
                yield f"{text}: what it does depends on how many samples there are (by {size:.0e})", False


PROBES: dict[str, list[Callable[[Layer, float], Iterator[tuple[str, bool]]]]] = {
    "unchanged": [
        Same("its forward changes its {what} in {mode}, each replica and micro-batch its own",
             lambda layer, training: (layer.after[training], layer.before[training])),
    ],
    "repeats": [_repeats],
    "leaves its input": [
        Same("writes into its input in {mode}, which the layer before may need",
             lambda layer, training: (layer.seen[training]["inputs"], dict(enumerate(layer.rows(_FEW))))),
    ],
    "halves": [
        Same("samples see each other in {mode}: half of a batch gives other numbers than the whole",
             lambda layer, training: layer.joined(training, "outputs"), Layer.rule),
        Same("", lambda layer, training: (layer.halves[True][0]["numbers"], layer.seen[True]["numbers"]),
             lambda layer, training: "passes on a number of its micro-batch: results depend on its size", [TRAINING]),
    ],
    "recomputation": [
        Same("gives other gradients under train.activation_checkpointing",
             lambda layer, training: (layer.run(True, again=True)["gradients"], layer.seen[True]["gradients"]),
             modes=[TRAINING]),
    ],
    "loss": [
        Same("{loss} of a batch is not the sum over its halves in {mode}: give the sum of terms and their number",
             lambda layer, training: layer.joined(training, "sums"), Layer.rule),
    ],
    "sizes": [_sizes],
    "outputs": [_outputs],
    "initial weights": [
        Same("initial numbers of {what} depend on what was built before: draw them from torch's generator",
             lambda layer, training: (layer.parameters(*layer.chain.names[:1], layer.name),
                                      layer.parameters(layer.name)), modes=[TRAINING]),
    ],
}  # fmt: skip


def probe(setup: Setup, own: int = 0) -> Iterator[Finding]:
    """Yield the findings of each probe in each layer; for a probe without findings, a finding without text.

    A layer with a finding of "unchanged" or "repeats" is not probed further, because other differences would follow.
    "sizes" also skips the layers with a finding of "halves" or "loss". ``own`` is the number of samples per
    micro-batch of the run to verify: "sizes" computes as many at once, and as many as a step has.

    Raises:
        Interrupted: This process was told to stop.
    """
    chain, tolerance = setup.chain, setup.cfg.verify.tolerance
    try:
        traces = trace(chain, setup.sample, setup.plan.precision, "cpu")
        kept = [layer.kept / setup.plan.microbatch_size for layer in traces]
    except PlanError as error:
        needed = len(chain.layers) > 1  # by pipelines, which one layer does not run in
        yield Finding("shapes", text=str(error).partition(". ")[0], holds=not needed)
        kept = None
    else:
        yield Finding("shapes", holds=True)
    shared = [Finding("shared parameters", *where) for where in _shared(chain)]
    yield from shared or [Finding("shared parameters", holds=True)]
    if shared:  # a layer that is built would change another
        return
    layers, too_large = _layers(setup, own, kept)
    skipped: list[Layer] = []
    for name, probes in PROBES.items():
        found = [*too_large] if name == "sizes" else []
        by_layer = {}
        for layer in layers:
            _check_stopped()
            if name != "sizes" or layer not in skipped:
                by_layer[layer] = [problem for same in probes for problem in _found(same, layer, tolerance)]
        if name in ("unchanged", "repeats"):
            layers = [layer for layer in layers if not by_layer[layer]]
        elif name in ("halves", "loss"):
            skipped += [layer for layer in layers if by_layer[layer]]
        found += [Finding(name, layer.kind, *found_here) for layer, some in by_layer.items() for found_here in some]
        yield from found or [Finding(name, holds=True)]


def _layers(setup: Setup, own: int, kept: list[float] | None) -> tuple[list[Layer], list[Finding]]:
    """Build every layer with its input, and find which batches are too large for this machine.

    ``kept`` lists the bytes that each layer keeps per sample for the backward; None if they are unknown.
    """
    chain, dtype, step = setup.chain, parameter_dtype(setup.plan.precision), setup.plan.microbatch_size
    cut = {training: examine(chain, setup.sample, training=training) for training in (True, False)}
    sizes = sorted({size for size in (step, own) if size > _SAMPLES})
    indices = np.arange(max([_SAMPLES, *sizes]), dtype=np.int64) % len(setup.data.train)
    samples = Batch(*setup.data.train.read(indices, 0)).map(lambda t: converted(t, dtype))
    layers, too_large, inputs = [], [], samples.input_tensors
    for i, name in enumerate(chain.names):
        _check_stopped()
        try:
            layers.append(layer := Layer(setup, name, inputs, samples, cut))
        except Exception as error:  # a user's code
            text = f"{_SAMPLES} samples cannot be computed in {setup.plan.precision}: {_first_line(error)}"
            if "double" in text.lower():
                text += (
                    ". If the layer computes in float32 whatever its weights are, verify it with train.precision=fp32"
                )
            too_large.append(Finding("sizes", f"{name} ({type(chain.skeleton([name])[name]).__name__})", text))
            break
        each = (kept[i] if kept else 0) + 4 * sum(t.nbytes for t in layer.seen[True]["given"].values()) / _SAMPLES
        while sizes:
            needed, seconds = sizes[-1] * each, 5 * sizes[-1] * layer.seconds
            if needed < available_memory() and (sizes[-1] == step or seconds < _PATIENCE_S / len(chain.names)):
                break
            text = f"no batch of {sizes[-1]} was computed from here on: it takes about {needed / 2**30:.1f} GiB and "
            too_large.append(Finding("sizes", layer.kind, f"{text}{seconds:.0f} s", holds=True))
            sizes.pop()
        layer.sizes, count = tuple(sizes), max([_SAMPLES, *sizes])
        seen = layer.run(True, slice(0, count), backward=False) if sizes else layer.seen[True]
        inputs = tuple(t.detach().requires_grad_(t.requires_grad) for t in seen["given"].values())
        samples = samples.map(lambda t, count=count: t[:count])
    return layers, too_large


def _found(same: Callable, layer: Layer, tolerance: float) -> list[tuple[str, bool]]:
    try:
        return list({text.partition(" (by ")[0]: (text, holds) for text, holds in same(layer, tolerance)}.values())
    except Exception as error:  # a user's code
        return [(f"some numbers of samples cannot be computed: {_first_line(error)}", False)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _check_stopped() -> None:
    """Raise Interrupted where this process was told to stop."""
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
