"""A long run with many checkpoints and evaluations: what it holds at its end is what it held at its beginning."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from commandline import Started
from faults.compare import corrupt
from faults.table import Trial

_EVERY = 50  # steps between checkpoints, and between evaluations
_WARM_UP = 0.05  # of the steps: by then all is allocated
_MOST_GROWTH = 16 * 2**20  # bytes; a leak of 1 KB per step would be more
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Held:
    """What the process holds after ``step``: resident memory in bytes, and open descriptors."""

    step: int
    memory: int
    descriptors: int


def soak(steps: int, folder: Path) -> Trial:
    """A run of the toy model; its trial names memory and descriptors after the warm-up and at the end."""
    often = [f"train.checkpoint_every={_EVERY}", f"train.eval_every={_EVERY}", "train.epochs=null"]
    started = Started([f"train.steps={steps}", *often, "logger=none", "device=cpu"], folder / "run", fresh=True)
    first = last = None
    begin = time.monotonic()
    try:
        while started.process.poll() is None and time.monotonic() - begin < _TIMEOUT_S:
            held = _held(started)
            if held is not None and _WARM_UP * steps <= held.step < steps:
                first, last = first or held, held
            time.sleep(0.1)
        run = started.wait(1.0)
    finally:
        started.kill()
    wrong = corrupt(run.folder)
    if run.code != 0 or [line["step"] for line in run.steps] != list(range(1, steps + 1)):
        wrong.append(f"exit code {run.code} after {len(run.steps)} of {steps} steps")
    if len(run.evaluations) != steps // _EVERY:
        wrong.append(f"{len(run.evaluations)} evaluations")
    if first is None or last.step - first.step < steps / 2:
        wrong.append("it was over before it could be measured")
        return Trial(f"soak of {steps:,} steps", "single", False, problem="; ".join(wrong[:2]))
    if last.memory - first.memory > _MOST_GROWTH or last.descriptors > first.descriptors + 2:
        wrong.append(f"it grew: {first}, {last}")
    name = (
        f"soak of {steps:,} steps: memory {first.memory >> 10:,} KB at step {first.step:,} and "
        f"{last.memory >> 10:,} KB at step {last.step:,}, descriptors {first.descriptors} and {last.descriptors}"
    )
    return Trial(name, "single", not wrong, problem="; ".join(wrong[:2]))


def _held(started: Started) -> Held | None:
    """What the process holds now; None before its first step and after its end."""
    try:
        with open(started.folder / "metrics.jsonl", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 2000))
            step = json.loads(file.read().splitlines()[-1])["step"]
        process = psutil.Process(started.process.pid)
        return Held(step, process.memory_info().rss, process.num_fds())
    except (OSError, LookupError, ValueError, psutil.Error):
        return None
