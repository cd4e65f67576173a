"""The search for the first number, in the order of computation, that differs between a layout and one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from training.studies.verification.layouts import Compared, Runs
from training.studies.verification.probes import Finding, difference, largest_difference
from training.studies.verification.recording import INPUT, KINDS, OUTPUT, OUTPUT_GRADIENT, Key


def first_difference(runs: Runs, layout: Compared, findings: Sequence[Finding]) -> str:
    """Record each layer in the first differing step, or else the last. Return a sentence about the first difference."""
    tolerance, names = runs.limits["gradients"], runs.chain.names
    for step in range(1, runs.steps + 1):
        both = ({"loss": runs.results(one, "loss")[f"at step {step}"], **runs.gradients(one, step)}
                for one in (layout, runs.first))  # fmt: skip
        of_step, what = largest_difference(*both)
        if of_step > tolerance:
            break
    after = f" of step {step}" * (step > 1)
    records = []
    for one, folder in ((runs.first, "recorded-first"), (layout, "recorded")):
        runs.launch(one, runs.folder / folder, [("plain", None, step)], record=step)
        records.append(_records(runs.folder / folder))
    theirs, ours = records

    def place(key: Key) -> tuple:
        forward, number = key[2] in (INPUT, OUTPUT), names.index(key[0])
        return not forward, number if forward else -number, KINDS.index(key[2]), key[1]

    for key in sorted(theirs, key=place):
        (wanted, _), *_ = theirs[key]
        own, rank = _whole(ours.get(key, []), wanted)
        if (size := difference(own, wanted)) > tolerance:
            return _sentence(runs, key, size, rank, after) + _explained(key[0], findings)
    if of_step <= tolerance:
        kind, size, at = layout.largest
        why = _explained("" if kind in ("evaluation", "metrics", "next step") else at, findings)
        return f"first in {kind} {at}, by {size:.0e}; all layers and gradients{after} are equal{why}"
    tied = ", ".join(alias for alias, owner in runs.chain.tied.items() if owner == what)
    return (
        f"first in the gradient of {what}{f' (tied: {tied})' if tied else ''}{after}, by {of_step:.0e}; every layer's "
        "input, output and their gradients are equal, so it is in how gradients are added up over micro-batches, "
        f"replicas, ranks that share a layer, or tied parameters{_explained(what, findings)}"
    )


def _records(folder: Path) -> dict[Key, list[tuple[Tensor, int]]]:
    """Return the recorded tensors with their ranks. A key has several tensors if ranks divide the layer."""
    found: dict[Key, list[tuple[Tensor, int]]] = {}
    for file in sorted(folder.glob("record_*.pt")):
        for key, tensor in torch.load(file).items():
            found.setdefault(key, []).append((tensor, int(file.stem[7:])))
    return found


def _whole(parts: Sequence[tuple[Tensor, int]], like: Tensor) -> tuple[Tensor | None, int]:
    """Return a recorded tensor and its last rank. Parts of the sequence are concatenated."""
    if not parts:
        return None, -1
    tensor, rank = parts[-1]
    divided = tensor.dim() > 1 and len(parts) > 1 and tensor.shape[1] * len(parts) == like.shape[1]
    return torch.cat([part for part, _ in parts], dim=1) if divided else tensor, rank


def _sentence(runs: Runs, key: Key, size: float, rank: int, after: str) -> str:
    layer, first, kind, _ = key
    way, giver = ("forward", "before") if kind in (INPUT, OUTPUT) else ("backward", "after")
    where, microbatch = f"first in the {way} of {layer}{after}", first // runs.samples
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


def _explained(name: str, findings: Sequence[Finding]) -> str:
    near = [finding for finding in findings if not name or name.startswith(finding.layer.split(" ")[0])]
    return f". Probe: {near[0].text}" if near else ". No probe explains it"
