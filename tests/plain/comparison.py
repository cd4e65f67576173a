"""A run of a program beside the loop in plain torch, and what differs."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from plain import blocks
from plain.loop import Found, Loop, Moved, several
from plain.programs import Program, simpler
from torch import Tensor

from common.errors import UserError
from data.tensors import TensorData
from models.losses import Several
from models.sequential import chain_of
from training import train

NEAR = 1e-9  # in fp64, relative: the rounding of the first steps grows in later ones


class Outcome(NamedTuple):
    """kind: equal, refused, torch refuses, diverges, hangs, crash or bad; what is said; the largest difference."""

    kind: str
    words: str = ""
    difference: float = 0.0


def run(program: Program, layout: str, folder: Path, *words: str) -> Found:
    """What a run finds."""
    losses, (first, valid, test) = [kind.loss() for kind in program.losses], program.tensors(program["shared"])
    factors = {f"target_{i}": factor for i, factor in enumerate(program["factors"], 1)}
    net, loss = program.net(), Several(losses, factors) if losses[1:] else losses[0]
    divided = not program.needs.isdisjoint("tpe")
    given = {"model": chain_of(net, loss, cut=program.cut(net))} if divided else {"model": net, "loss": loss}
    given["data"] = TensorData(*first, valid=valid, test=test)
    result = train(*program.words(layout), *words, f"hydra.run.dir='{folder}'", **given)
    found = {(line["step"], key): math.nan if x is None else x for line in result.metrics for key, x in line.items()}
    found |= {("the end", key): value for key, value in {**result.summary, **result.state_dict()}.items()}
    if (folder / "checkpoints/best").exists():
        found |= {("best", name): tensor for name, tensor in result.state_dict("best").items()}
    outputs = several(result.predict("test", "parallel.threads=1")) if program["predict"] else ()
    for i, output in enumerate(map(torch.from_numpy, outputs)):
        found["the end", f"prediction {i}"] = output.movedim(-1, 1) if program["shared"] else output
    return found


def differences(found: Found, wanted: Found, since: int = 0) -> Found:
    """How much what is found differs from what is wanted, relative; of the steps after ``since``."""
    offs = {}
    for (at, name), value in wanted.items():
        if name.endswith("num_batches_tracked") or (isinstance(at, int) and at <= since):
            continue  # steps are counted here, and also in eval mode
        other = found.get((at, name), math.nan)
        one, other = (torch.as_tensor(x, dtype=torch.float64).nan_to_num(1e300, 1e300) for x in (value, other))
        off = (other - one).abs().max() / one.abs().max().clamp(min=1e-3) if one.numel() else torch.zeros(())
        offs[at, name] = off.item() if (at, name) in found and one.shape == other.shape else math.inf
    return offs


def limits(program: Program, wanted: Found, runs: int) -> Found:
    """What numbers may differ by: three times what they do in ``runs`` of the loop whose results rounding moves.

    Or what half of the numbers do if that is more. What rounding does not change must be equal. In fp64 a constant is
    enough, and only 50 runs measure what exceeds it.
    """
    # torchmetrics adds up in float32.
    near = {(at, name): 1e-5 if name.partition("_")[2] in blocks.METRICS else NEAR for at, name in wanted}
    if (exact := program["train.precision"] == "fp64") and runs < 50:
        return near
    moved = []
    torch.backends.mha.set_fastpath_enabled(False)  # one operator, inside of which there is no autocast then
    for seed in range(runs):
        loop = Loop(program)
        with Moved(seed):
            moved.append(differences(loop.train(), wanted))
    torch.backends.mha.set_fastpath_enabled(True)
    most = {key: max(one[key] for one in moved) for key in moved[0]}
    if exact:  # a rank among equal outputs, or an orthogonal matrix, may follow from rounding
        return {key: max(near[key], 3 * off) for key, off in most.items()}
    middle = median(off for off in most.values() if off)
    return {key: 3 * max(off, middle) if off else 1e-6 for key, off in most.items()}


def first_bad(found: Found, wanted: Found, offs: Found, near: Found) -> str:
    """The first number that differs by more than its limit."""
    for (at, name), off in offs.items():
        if not off <= near[at, name]:
            one, other = wanted[at, name], found.get((at, name), "missing")
            values = "differs" if isinstance(one, Tensor) else f"is {other}, not {one}"
            return f"{name} of {at} {values} ({off:.0e}, limit {near[at, name]:.0e})"
    return ""


def outcome(program: Program, folder: Path) -> Outcome:
    """How a run of the program ends beside the loop, and a second one that resumes it elsewhere."""
    threads, worst, since, resumed = torch.get_num_threads(), 0.0, 0, []
    torch.set_num_threads(1)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        try:
            wanted = Loop(program).train()
            if not all(abs(value) < 1e6 for (_, name), value in wanted.items() if name.endswith("loss")):
                return Outcome("diverges")
            near = limits(program, wanted, 3)
        except (RuntimeError, ValueError) as error:
            return Outcome("torch refuses", str(error))
        for number, layout in enumerate([program["layout"], *[program["then"]] * (program["then"] is not None)]):
            found = run(program, layout, folder / str(number), *resumed)
            offs = differences(found, wanted, since)
            worst = max(worst, *offs.values())
            if first_bad(found, wanted, offs, near):
                near = limits(program, wanted, 50)
            if words := first_bad(found, wanted, offs, near):
                return Outcome("bad", f"{'resumed in ' * number}{layout}: {words}", worst)
            saved = min((folder / str(number) / "checkpoints").glob("step-*"))
            since, resumed = int(saved.name[5:]), [f"train.resume='{saved}'"]
            if since == program.total:
                break
    except (UserError, TimeoutError, OverflowError) as error:
        kinds = {TimeoutError: "hangs", OverflowError: "torch refuses"}
        return Outcome(kinds.get(type(error), "refused"), str(error))
    except Exception as error:
        kind = "torch refuses" if program["train.compile"] and not is_compiled(program) else "crash"
        return Outcome(kind, f"{type(error).__name__}: {error}")
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome("equal", difference=worst)


def is_compiled(program: Program) -> bool:
    """Whether torch itself compiles the model."""
    inputs, _ = program.tensors()[0]
    with suppress(Exception):
        return torch.compile(program.net(), backend="eager")(*several(inputs)) is not None
    return False


def sentence(words: str) -> str:
    """What a refusal says, without its numbers and names."""
    first = re.split(r"[.:;] |, (?=so |and )", re.sub(r"^layer '[^']*' \(\w+\): ", "", words.strip()))[0]
    return re.sub(r"\d[\d.]*|'[^']*'|\b(b\d|stem|head|module)\b[\w.]*", "…", first)


def shrunk(program: Program, fails: Callable[[Program], bool], tries: int = 100) -> Program:
    """A simpler program that fails, too: one thing less at a time, until nothing can be left out."""
    candidates = simpler(program)
    while tries > 0 and (candidate := next(candidates, None)) is not None:
        tries -= 1
        if fails(candidate):
            program, candidates = candidate, simpler(candidate)
    return program
