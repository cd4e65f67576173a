"""The search for the first number, in the order of computation, that differs between a layout and one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from training.studies.verification.layouts import Compared, Runs, limits_of
from training.studies.verification.probes import Finding, difference
from training.studies.verification.recording import INPUT, INPUT_GRADIENT, KINDS, OUTPUT, OUTPUT_GRADIENT, Key

Part = tuple[Tensor, int, tuple[int, ...]]  # of a recorded tensor: the rank, and its positions in the sequence


def first_difference(runs: Runs, layout: Compared, findings: Sequence[Finding]) -> str:
    """Record each layer in the first differing step, or else the last. Return a sentence about the first difference."""
    if all(ratio <= 1 for ratio in layout.ratios.values()):
        return f"the results are equal, but {layout.apart}"
    names = runs.chain.names

    def numbers(one: Compared, step: int) -> dict[str, Tensor]:
        return {"loss": runs.results(one, "loss")[f"at step {step}"], **runs.gradients(one, step)}

    for step in range(1, runs.steps + 1):
        ratio, of_step, what = runs.largest(f"step {step}", partial(numbers, step=step), layout) or (0.0, 0.0, "")
        if ratio > 1:
            break
    after = f" of step {step}" * (step > 1)
    theirs, ours, *moved = (_recorded(runs, one, step) for one in (runs.first, layout, *runs.perturbed))

    def place(key: Key) -> tuple:
        forward, number = key[2] in (INPUT, OUTPUT), names.index(key[0])
        return not forward, number if forward else -number, KINDS.index(key[2]), key[1]

    wanted = {key: parts[0][0] for key, parts in theirs.items()}
    limits = {}
    for kind in KINDS:
        of_kind = {key: tensor for key, tensor in wanted.items() if key[2] == kind}
        spread = ({key: parts[0][0] for key, parts in record.items() if key in of_kind} for record in moved)
        limits[kind] = limits_of(of_kind, spread, runs.cfg.verify.tolerance)
    for key in sorted(theirs, key=place):
        for own, rank in _whole(key, ours.get(key, []), wanted[key]):
            limit = limits[key[2]]
            if (size := difference(own, wanted[key])) > limit.get(key, limit[""]):
                return _sentence(runs, key, size, rank, after) + _explained(key[0], findings)
    if ratio <= 1:
        kind, size, at = layout.largest
        why = _explained("" if kind in ("evaluation", "metrics", "next step") else at, findings)
        return f"first in {kind} {at}, by {size:.0e}; all layers and gradients{after} are equal{why}"
    tied = ", ".join(alias for alias, owner in runs.chain.tied.items() if owner == what)
    of, added = ("the loss", "losses") if what == "loss" else (f"the gradient of {what}", "gradients")
    return (
        f"first in {of}{f' (tied: {tied})' if tied else ''}{after}, by {of_step:.0e}; every layer's input, output and "
        f"their gradients are equal, so it is in how {added} are added up over micro-batches, replicas, ranks that "
        f"share a layer, or tied parameters{_explained(what, findings)}"
    )


def _recorded(runs: Runs, layout: Compared, step: int) -> dict[Key, list[Part]]:
    """Run a layout up to a step, and return what each rank has recorded, with the rank and its positions.

    A key has several tensors if ranks divide or share the layer.
    """
    folder = runs.folder / f"recorded-{step}-{runs.path(layout).name}"
    if layout not in (runs.first, *runs.perturbed) or not folder.exists():  # those are recorded once for all layouts
        runs.launch(layout, folder, [("plain", None, step)], record=step)
    found: dict[Key, list[Part]] = {}
    factor = 0.0  # of the loss: layouts may have others, the ranks of a layout may not
    for file in sorted(folder.glob("record_*.pt")):
        records, positions, scale = torch.load(file)
        factor = factor or scale
        for key, tensor in records.items():
            given = tensor / factor if key[2] in (OUTPUT_GRADIENT, INPUT_GRADIENT) else tensor
            found.setdefault(key, []).append((given, int(file.stem[7:]), tuple(positions)))
    return found


def _whole(key: Key, parts: Sequence[Part], like: Tensor) -> Iterator[tuple[Tensor | None, int]]:
    """Yield a recorded tensor of each rank, with the rank. Parts of the sequence are put together."""
    of: dict[tuple, list[Tensor]] = {}  # by the positions of a rank
    for tensor, _, positions in parts:
        of.setdefault(positions, []).append(tensor)
    if len(of) > 1 and like.dim() == 0 and key[2] == OUTPUT:  # a loss
        yield sum((tensors[0] for tensors in of.values()), torch.zeros_like(like)), parts[-1][1]
    elif like.dim() > 1 and any(tensor.shape != like.shape for tensor, *_ in parts):
        each = [tensors[0] if len(at) == tensors[0].shape[1] else torch.cat(tensors, 1) for at, tensors in of.items()]
        whole, order = torch.cat(each, 1), torch.tensor(sum(of, ()), dtype=torch.int64).argsort()
        yield whole[:, order] if len(of) > 1 else whole, parts[-1][1]
    else:
        yield from [(tensor, rank) for tensor, rank, _ in parts] or [(None, -1)]


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
