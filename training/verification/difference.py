"""The first number of a step that differs between a layout and one process, in the order of computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from training.verification.probes import Finding, difference
from training.verification.recording import INPUT, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT

if TYPE_CHECKING:
    from training.verification.layouts import Outcome, Runs

_FORWARD, _BACKWARD = (INPUT, OUTPUT), (OUTPUT_GRADIENT, INPUT_GRADIENT)


@dataclass(frozen=True)
class _Difference:
    layer: str
    what: str
    first: int
    rank: int
    size: float


def first_difference(runs: Runs, outcome: Outcome, findings: Sequence[Finding], names: Sequence[str], size: int) -> str:
    """Run the first step that differs once more with every layer recorded, and say in a sentence where it begins.

    Args:
        runs: What has compared the layout.
        outcome: The layout, which has run.
        findings: Of the probes.
        names: The model's layers.
        size: Samples of a micro-batch.
    """
    step = _first_step(runs, outcome)
    if step is None:
        return "differs in the evaluation alone"
    records = []
    for place, folder in ((runs.reference, "first-reference"), (outcome.place, "first")):
        runs.launch(place, runs.folder / folder, [("plain", None, step)], record=step)
        files = sorted((runs.folder / folder).glob("record_*.pt"))
        records.append({key: (t, int(f.stem[7:])) for f in files for key, t in torch.load(f).items()})
    theirs, ours = records
    tolerance = runs.cfg.verify.tolerance
    after = f" of step {step}" if step > 1 else ""
    for layers, kinds, way in ((names, _FORWARD, "forward"), (list(reversed(names)), _BACKWARD, "backward")):
        for layer in layers:
            for kind in kinds:
                if (found := _of_kind(theirs, ours, layer, kind, tolerance)) is not None:
                    return _sentence(found, way, after, size, names, findings)
    return _of_gradients(runs, outcome, step, after, findings)


def _first_step(runs: Runs, outcome: Outcome) -> int | None:
    tolerance = runs.cfg.verify.tolerance
    folder = runs.folder_of(outcome)
    for step, (a, b) in enumerate(zip(outcome.losses, runs.losses, strict=False), start=1):
        if not abs(a - b) <= tolerance * abs(b) or runs.of_gradients(folder, step)[0] > tolerance:
            return step
    return None if outcome.losses and set(outcome.beyond(runs.limits)) <= {"evaluation", "metrics"} else runs.steps


def _of_kind(theirs: dict, ours: dict, layer: str, kind: str, tolerance: float) -> _Difference | None:
    """Return the first micro-batch in which a layer's tensors of one kind differ."""
    for key in sorted(key for key in theirs if (key[0], key[2]) == (layer, kind)):
        if key not in ours:
            return _Difference(layer, kind, key[1], -1, torch.inf)
        (a, rank), (b, _) = ours[key], theirs[key]
        if (gap := difference(a, b)) > tolerance:
            return _Difference(layer, kind, key[1], rank, gap)
    return None


def _sentence(
    found: _Difference, way: str, after: str, size: int, names: Sequence[str], findings: Sequence[Finding]
) -> str:
    microbatch = found.first // size
    if found.rank < 0:
        return (
            f"first in the {way} of {found.layer}{after}: micro-batch {microbatch} (samples {found.first} to "
            f"{found.first + size - 1}) was not computed"
        )
    if found.what == INPUT and found.layer == names[0]:
        what = "the samples that it gets are others"
    elif found.what in (INPUT, OUTPUT_GRADIENT):
        giver = "before" if way == "forward" else "after"
        what = f"the {found.what} is not what the layer {giver} it gave: it changed on its way"
    else:
        what = f"its {'inputs are' if way == 'forward' else 'output and the gradient of that are'} equal"
    where = f"the {way} of {found.layer}{after} on rank {found.rank}, micro-batch {microbatch}"
    return f"first in {where}, by {found.size:.0e}; {what}{_explained(found.layer, findings)}"


def _of_gradients(runs: Runs, outcome: Outcome, step: int, after: str, findings: Sequence[Finding]) -> str:
    """Name the parameter whose gradient differs although all layers agree."""
    folder = runs.folder_of(outcome)
    size, name = runs.of_gradients(folder, step)
    if size <= runs.cfg.verify.tolerance:
        size, name = max(outcome.differences.get(kind, (0.0, "")) for kind in ("weights", "buffers", "optimizer"))
        if size <= runs.cfg.verify.tolerance:
            why = next((f". Probe: {f.text}" for f in findings if f.probe == "repeats"), "")
            return f"no difference was found in another run: the model does not repeat itself{why}"
        what = name or "what is saved"
        return f"first in {what} after the update{after}, by {size:.0e}; all layers and gradients are equal"
    a, b = (one.get(name) for one in (runs.gradients(folder, step), runs.gradients(runs.home, step)))
    if a is None or b is None:
        times = "there is one, and should be none" if b is None else "there is none"
    else:
        factor = ((a * b).sum() / (b * b).sum().clamp(min=1e-300)).item()
        times = f"{factor:.3g} times what it should be" if difference(a, factor * b) < 1e-3 else f"by {size:.0e}"
    ties = [alias for alias, owner in runs.tied.items() if owner == name]
    tied = f" (tied: {', '.join(ties)})" if ties else ""
    return (
        f"first in the gradient of {name}{tied}{after}: {times}; every layer's input, output and their gradients are "
        f"equal, so it is in how gradients are added up over micro-batches, replicas or tied parameters"
        f"{_explained(name, findings)}"
    )


def _explained(name: str, findings: Sequence[Finding]) -> str:
    near = [f for f in findings if f.layer and name.startswith(f.layer.split(" ")[0])]
    return f". Probe: {near[0].text}" if near else ". No probe explains it"
