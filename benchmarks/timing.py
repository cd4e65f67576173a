"""Contenders take turns, round after round, so that noise of the machine strikes all of them alike."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
_COLUMNS = ("seconds a step (median)", "fastest", "slowest")  # of a Spread, in a table


class Spread(NamedTuple):
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
        """Return the spread of ``seconds``, of which there is one at least."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))

    @classmethod
    def read(cls, row: Mapping[str, str]) -> Spread:
        """Return the spread that ``columns`` has written into a row."""
        return cls(*(float(row[key]) for key in _COLUMNS))

    def columns(self) -> dict[str, str]:
        """Return the spread as columns of a table."""
        digits = 3 if self.median >= 0.1 else 5
        return {column: f"{value:.{digits}f}" for column, value in zip(_COLUMNS, self, strict=True)}


def take_turns(
    contenders: Mapping[Key, Callable[[int], object]],
    rounds: int,
    warm_up: int = 1,
    barrier: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[float]]:
    """Measure the step of each contender once in every round.

    Args:
        contenders: The step by name. It gets the round's number, from 1.
        rounds: The number of rounds that are measured.
        warm_up: The number of rounds before them, which are not.
        barrier: Called before and after each step, for several processes that measure together.
        clock: Returns seconds; ``time.process_time`` for those of the CPU, which other processes do not lengthen.

    Returns:
        Seconds of each contender's steps, one per measured round.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in contenders}
    for number in range(1, warm_up + rounds + 1):
        for name, step in contenders.items():
            barrier()
            start = clock()
            step(number)
            barrier()
            if number > warm_up:
                seconds[name].append(clock() - start)
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
