"""Faults as data: what strikes which rank, where, what is known of it afterwards, and how the run has ended."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

# Points within a step, in its order; then a save's, as training.checkpoint.save lists them.
STEP = ("forward", "backward", "all-reduce", "optimizer step")
SAVE = ("copy_tensors", "write_file", "describe", "write_manifest", "publish", "update_link", "remove_old")
WRITERS = SAVE[:2]  # phases of every rank that writes; the others are rank 0's alone
EVALUATION = "evaluation"
MOMENT = "a moment"  # of the wall clock, after the step has begun


@dataclass(frozen=True)
class Fault:
    """kill, stop (SIGSTOP), term (SIGTERM to the launching process) or nan, for ``rank``.

    point    where; ``at`` "before" or "after" what happens there
    actor    the rank that reaches the point, where the victim has no part in it
    step     of the training step, or the step whose save it is; counts from 1
    delay_s  later than that
    """

    kind: str
    rank: int
    point: str
    step: int
    at: str = "before"
    actor: int | None = None
    delay_s: float = 0.0

    @property
    def struck_by(self) -> int:
        return self.rank if self.actor is None else self.actor

    def __str__(self) -> str:
        return f"{self.kind} rank {self.rank} {self.at} {self.point}, step {self.step}"


@dataclass
class Record:
    """The plan and its traces in a folder: ``struck-N.json`` of fault N, ``begun-N-R.json`` of rank R of attempt N."""

    folder: Path

    def write(self, faults: list[Fault]) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "plan.json").write_text(json.dumps([asdict(fault) for fault in faults]))

    def faults(self) -> list[Fault]:
        return [Fault(**entry) for entry in json.loads((self.folder / "plan.json").read_text())]

    def next_fault(self) -> int:
        """The number of the first that has not struck; after the last one where all have."""
        number = 0
        while (self.folder / f"struck-{number}.json").exists():
            number += 1
        return number

    def note(self, name: str, content: dict) -> bool:
        """Leave a trace, at once; False where it is there already."""
        try:
            descriptor = os.open(self.folder / f"{name}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        return True

    def read(self, name: str) -> dict | None:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else None


@dataclass(frozen=True)
class Trial:
    """One fault that struck. steps_lost: None where the fault ends the run, as it should, or loses nothing to speak of;
    equal: None where there is nothing to compare."""

    fault: str
    strategy: str
    survived: bool
    steps_lost: int | None = None
    equal: bool | None = None
    problem: str = ""


def rows(trials: Iterable[Trial]) -> list[dict]:
    """fault, strategy, tried, survived, steps lost (at most), bits equal, problem (the first)."""
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.fault, trial.strategy), []).append(trial)
    return [_row(fault, strategy, group) for (fault, strategy), group in groups.items()]


def _row(fault: str, strategy: str, trials: list[Trial]) -> dict:
    lost = [t.steps_lost for t in trials if t.steps_lost is not None]
    compared = [t.equal for t in trials if t.equal is not None]
    return {
        "fault": fault,
        "strategy": strategy,
        "tried": len(trials),
        "survived": sum(t.survived for t in trials),
        "steps lost": " to ".join(map(str, sorted({min(lost), max(lost)}))) if lost else "",
        "bits equal": f"{sum(compared)} of {len(compared)}" if compared else "",
        "problem": next((t.problem for t in trials if t.problem), ""),
    }
