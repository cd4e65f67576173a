"""SIGTERM at any moment: saved within ten seconds, exit code 75, and the resumed run is as if nothing had been."""

from __future__ import annotations

import random
from pathlib import Path

from faults.compare import corrupt, differences
from faults.plan import EVALUATION, MOMENT, SAVE, STEP, Fault
from faults.runs import Ended, launch
from faults.table import Trial

EXIT_CODE = 75
WITHIN_S = 10.0
_PER_SIGNAL = 40  # steps: some pass, of a few milliseconds each, until a signal has reached all ranks


def moments(strategy: str, count: int, seed: int) -> list[Fault]:
    """Random ones, one in four in an evaluation, in the order in which a run meets them."""
    draw = random.Random(seed)
    faults = []
    for number in range(count):
        step = _PER_SIGNAL * (number + 1)
        point = EVALUATION if number % 4 == 3 else draw.choice([MOMENT, MOMENT, *STEP, *SAVE[:2]])
        if point not in (EVALUATION, *SAVE):
            step += draw.choice([1, 2, 3])
        delay = draw.uniform(0.0, 0.03) if point in (MOMENT, EVALUATION) else 0.0
        faults.append(Fault("term", 0, point, step, delay_s=delay))
    return faults


def interrupt(strategy: str, faults: list[Fault], folder: Path, *more: str) -> list[Trial]:
    """A run that is told to stop, resumed, told to stop, … to its end, against one that is left alone.

    ``more``: further words of the command line.
    """
    steps = max(fault.step for fault in faults) + _PER_SIGNAL  # the last one is to arrive before the end, too
    undisturbed = launch(strategy, steps, folder / "undisturbed", [], *more)
    assert undisturbed.run.code == 0, undisturbed.run.console
    trials = []
    for fault in faults:
        ended = launch(strategy, steps, folder / "disturbed", [fault], "train.resume=auto", *more)
        trials.append((fault, ended, _problems(ended)))
    last = launch(strategy, steps, folder / "disturbed", [], "train.resume=auto", *more)
    wrong = differences(last, undisturbed)
    return [
        Trial(_name(fault), strategy, not problems, _lost(ended), not wrong, "; ".join([*problems, *wrong][:2]))
        for fault, ended, problems in trials
    ]


def _problems(ended: Ended) -> list[str]:
    struck = ended.record.read("struck-0")
    if struck is None or "missed" in struck:
        return ["the signal was never sent"]
    found = [f"left behind: {command}" for command in ended.left] + corrupt(ended.run.folder)
    if ended.run.code != EXIT_CODE:
        found.append(f"exit code {ended.run.code}: {ended.run.stderr.strip().splitlines()[-1:]}")
    if ended.at - struck["time"] > WITHIN_S:
        found.append(f"it took {ended.at - struck['time']:.1f} s")
    return found


def _lost(ended: Ended) -> int | None:
    """Steps on record that the newest checkpoint does not hold."""
    latest = ended.run.folder / "checkpoints" / "latest"
    if not latest.exists() or not ended.run.steps:
        return None
    return ended.run.steps[-1]["step"] - int(latest.resolve().name.partition("-")[2])


def _name(fault: Fault) -> str:
    return "SIGTERM in an evaluation" if fault.point == EVALUATION else "SIGTERM at a random moment"
