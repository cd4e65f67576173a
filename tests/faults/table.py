"""One line for each kind of fault under each strategy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
