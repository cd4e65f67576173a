"""The first number of a step that differs between a layout and one process, in the order of computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from training.verification.layouts import largest_difference
from training.verification.probes import Finding, difference
from training.verification.recording import INPUT, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT

if TYPE_CHECKING:
    from training.verification.layouts import Layout, Runs

_ORDER = (INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT)


def first_difference(runs: Runs, layout: Layout, findings: Sequence[Finding]) -> str:
    """Run the first step that differs once more with every layer recorded, and say in a sentence where it begins."""
    tolerance, names = runs.limits["gradients"], runs.chain.names
    steps = range(1, runs.steps + 1)
    step = next((step for step in steps if _of_step(runs, layout, step)[0] > tolerance), runs.steps)
    records = []
    for one, folder in ((runs.first, "recorded-first"), (layout, "recorded")):
        runs.launch(one, runs.folder / folder, [("plain", None, step)], record=step)
        files = sorted((runs.folder / folder).glob("record_*.pt"))
        records.append({key: (t, int(f.stem[7:])) for f in files for key, t in torch.load(f).items()})
    theirs, ours = records

    def place(key: tuple) -> tuple:
        layer, first, kind, _ = key
        number = names.index(layer)
        return kind not in (INPUT, OUTPUT), number if kind in (INPUT, OUTPUT) else -number, _ORDER.index(kind), first

    for key in sorted(theirs, key=place):
        own, rank = ours.get(key, (None, -1))
        if (size := difference(own, theirs[key][0])) > tolerance:
            return _sentence(runs, key, size, rank, step) + _explained(key[0], findings)
    return _of_update(runs, layout, step, findings)


def _of_step(runs: Runs, layout: Layout, step: int) -> tuple[float, str]:
    """Return the largest difference of the loss and the gradients of a step."""
    both = (
        {"loss": runs.results(one, "loss")[f"loss of step {step}"], **runs.gradients(one, step)}
        for one in (layout, runs.first)
    )
    return largest_difference(*both)


def _sentence(runs: Runs, key: tuple, size: float, rank: int, step: int) -> str:
    layer, first, kind, _ = key
    way, giver = ("forward", "before") if kind in (INPUT, OUTPUT) else ("backward", "after")
    where, microbatch = f"first in the {way} of {layer}{_after(step)}", first // runs.samples
    if rank < 0:
        last = first + runs.samples - 1
        return f"{where}: micro-batch {microbatch} (samples {first} to {last}) was not computed"
    if kind == INPUT and layer == runs.chain.names[0]:
        what = "the samples that it gets are others"
    elif kind in (INPUT, OUTPUT_GRADIENT):
        what = f"the {kind} is not what the layer {giver} it gave: it changed on its way"
    else:
        what = "its inputs are equal" if way == "forward" else "its output and the gradient of that are equal"
    return f"{where} on rank {rank}, micro-batch {microbatch}, by {size:.0e}; {what}"


def _of_update(runs: Runs, layout: Layout, step: int, findings: Sequence[Finding]) -> str:
    """Name the parameter that differs although all layers agree."""
    size, name = _of_step(runs, layout, step)
    if size <= runs.limits["gradients"]:
        size, what = layout.largest
        return f"first in {what}, by {size:.0e}; all layers and gradients{_after(step)} are equal"
    if name == "loss":
        return f"it was not found in another run: the model does not repeat itself{_explained('', findings)}"
    ours, theirs = (runs.gradients(one, step).get(name) for one in (layout, runs.first))
    by = f"by {size:.0e}"
    if ours is None or theirs is None:
        by = "there is one, and should be none" if theirs is None else "there is none"
    elif difference(ours, (factor := (ours * theirs).sum() / theirs.square().sum().clamp(min=1e-300)) * theirs) < 1e-3:
        by = f"{factor.item():.3g} times what it should be"
    aliases = [alias for alias, owner in runs.chain.tied.items() if owner == name]
    tied = f" (tied: {', '.join(aliases)})" if aliases else ""
    return (
        f"first in the gradient of {name}{tied}{_after(step)}: {by}; every layer's input, output and their gradients "
        "are equal, so it is in how gradients are added up over micro-batches, replicas or tied parameters"
        f"{_explained(name, findings)}"
    )


def _after(step: int) -> str:
    return f" of step {step}" * (step > 1)


def _explained(name: str, findings: Sequence[Finding]) -> str:
    near = [f for f in findings if f.layer and (name.startswith(f.layer.split(" ")[0]) or not name)]
    return f". Probe: {near[0].text}" if near else ". No probe explains it"
