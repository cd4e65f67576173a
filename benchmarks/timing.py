"""Contenders in turns, round after round, so that a noisy machine is noisy for all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """Seconds of one contender's turns."""

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Raises ValueError where there are none."""
        if not seconds:
            raise ValueError("nothing was measured: at least one round is needed")
        return cls(statistics.median(seconds), min(seconds), max(seconds))

    def columns(self) -> dict[str, str]:
        """As columns of a table."""
        digits = 3 if self.median >= 0.1 else 5
        return {
            "seconds a step (median)": f"{self.median:.{digits}f}",
            "fastest": f"{self.fastest:.{digits}f}",
            "slowest": f"{self.slowest:.{digits}f}",
        }


def take_turns(
    contenders: Mapping[Key, Callable[[int], object]],
    rounds: int,
    warm_up: int = 1,
    meet: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Seconds of each contender's step in each round, the rounds of ``warm_up`` left out.

    contenders  name -> step(number); numbers count from 1, the same for all contenders of a round
    meet        called before and after each step: where several processes measure together, a barrier
    """
    seconds: dict[Key, list[float]] = {name: [] for name in contenders}
    for number in range(1, warm_up + rounds + 1):
        for name, step in contenders.items():
            meet()
            start = time.perf_counter()
            step(number)
            meet()
            if number > warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def paired(seconds: Mapping[Key, Sequence[float]], one: Key, other: Key) -> float:
    """How many times as long ``other`` takes as ``one``: the median over the rounds, where both had the same noise."""
    return statistics.median(b / a for a, b in zip(seconds[one], seconds[other], strict=True))
