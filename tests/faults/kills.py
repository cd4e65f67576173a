"""kill -9 of each rank at each point: the group starts again and goes on from the newest checkpoint by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from faults.compare import differences
from faults.plan import SAVE, STEP, WRITERS, Fault
from faults.runs import RANKS, SAVE_EVERY, Ended, launch
from faults.table import Trial

_BEFORE_AND_AFTER = {"optimizer step", "write_file", "publish", "update_link"}
_WRITERS = {"ddp": 1, "pipelined": 2, "pipe_ddp": 2, "fsdp": 2}  # so many ranks, the first, write checkpoints


def every_kill(strategy: str) -> list[Fault]:
    """Each rank at each point of a step and of a save; ``spaced`` gives them their steps."""
    faults = []
    for rank in range(RANKS[strategy]):
        for point in (*STEP, *SAVE):
            takes_part = point in STEP or rank == 0 or (point in WRITERS and rank < _WRITERS[strategy])
            # A rank that has no part in a phase dies while rank 0 is in it.
            faults += [Fault("kill", rank, point, 0, at, None if takes_part else 0) for at in _ats(point)]
    return faults


def spaced(faults: list[Fault]) -> list[Fault]:
    """``faults`` for one run: each a checkpoint later than the one before, so that none is met again on the way."""
    # The first saves have nothing to fall back on, and nothing old to remove.
    steps = [SAVE_EVERY * (number + 5) for number in range(len(faults))]
    return [replace(f, step=step + (f.point in STEP)) for f, step in zip(faults, steps, strict=True)]


def last_step(faults: list[Fault]) -> int:
    """A run that ends here has met them all, and evaluates at the end."""
    return max((fault.step for fault in faults), default=0) + SAVE_EVERY + 2


def kill(strategy: str, faults: list[Fault], folder: Path) -> list[Trial]:
    """One run that meets all of ``faults``, against one that meets none."""
    steps = last_step(faults)
    undisturbed = launch(strategy, steps, folder / "undisturbed")
    assert undisturbed.run.code == 0, undisturbed.run.console
    restarts = f"launcher.max_restarts={len(faults)}"
    disturbed = launch(strategy, steps, folder / "disturbed", faults, restarts, timeout_s=60.0 + 40.0 * len(faults))
    wrong = differences(disturbed, undisturbed)
    return [_judge(strategy, n, fault, disturbed, wrong) for n, fault in enumerate(faults)]


def _ats(point: str) -> tuple[str, ...]:
    return ("before", "after") if point in _BEFORE_AND_AFTER else ("before",)


def _judge(strategy: str, number: int, fault: Fault, ended: Ended, wrong: list[str]) -> Trial:
    name = f"kill -9: {fault.point}"
    struck = ended.record.read(f"struck-{number}")
    if struck is None or "missed" in struck:
        return Trial(name, strategy, False, problem=f"{fault} never struck; {'; '.join(wrong)}")
    again = ended.record.read(f"begun-{number + 1}-{fault.rank}")
    finished = ended.run.code == 0
    if again is None:
        problem = "" if finished else f"{fault}: {'; '.join(wrong)}"
        return Trial(name, strategy, finished, None, not wrong, problem)
    lost = max(0, struck["done"] + 1 - again["first_step"])
    return Trial(name, strategy, finished, lost, not wrong, "; ".join(wrong[:2]))
