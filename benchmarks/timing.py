"""Contenders take turns, round after round, so that noise of the machine strikes all of them alike."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Spread:
    """The times of one contender.

    Attributes:
        median: In seconds.
        fastest: In seconds.
        slowest: In seconds.
    """

    median: float
    fastest: float
    slowest: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        """Return the spread of ``seconds``.

        Raises:
            ValueError: If there are none.
        """
        if not seconds:
            raise ValueError("nothing was measured: at least one round is needed")
        return cls(statistics.median(seconds), min(seconds), max(seconds))

    @classmethod
    def read(cls, row: Mapping[str, str]) -> Spread:
        """Return the spread that ``columns`` has written into a row."""
        return cls(*(float(row[key]) for key in ("seconds a step (median)", "fastest", "slowest")))

    def columns(self) -> dict[str, str]:
        """Return the spread as columns of a table."""
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
    barrier: Callable[[], object] = lambda: None,
) -> dict[Key, list[float]]:
    """Measure the step of each contender once in every round.

    Args:
        contenders: The step by name. It gets the round's number, from 1.
        rounds: The number of rounds that are measured.
        warm_up: The number of rounds before them, which are not.
        barrier: Called before and after each step, for several processes that measure together.

    Returns:
        Seconds of each contender's steps, one per measured round.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in contenders}
    for number in range(1, warm_up + rounds + 1):
        for name, step in contenders.items():
            barrier()
            start = time.perf_counter()
            step(number)
            barrier()
            if number > warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def tabulate(
    seconds: Mapping[str, Sequence[float]], more: Callable[[str, Spread], Mapping[str, object]] = lambda *_: {}
) -> list[dict]:
    """Return a row for each contender: its name, its spread, and the columns that ``more`` makes of both."""
    spreads = {name: Spread.of(values) for name, values in seconds.items()}
    return [{"run": name, **spread.columns(), **more(name, spread)} for name, spread in spreads.items()]


def paired(seconds: Mapping[Key, Sequence[float]], one: Key, other: Key) -> float:
    """Return how many times as long ``other`` takes as ``one``: the median of the ratios within each round."""
    return statistics.median(b / a for a, b in zip(seconds[one], seconds[other], strict=True))


def in_new_process(function: Callable, *args: Any) -> Any:
    """Return what ``function(*args)`` returns in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)
