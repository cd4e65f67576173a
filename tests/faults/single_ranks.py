"""One rank whose gradient is not a number, and one that no longer moves."""

from __future__ import annotations

from pathlib import Path

from faults.compare import corrupt
from faults.plan import Fault
from faults.runs import RANKS, SAVE_EVERY, Ended, launch
from faults.table import Trial

from parallel.strategies import strategy_info

_STEPS = 3 * SAVE_EVERY
# Ranks wait so long for each other, then those that gave up tell the launching process, which ends them all.
_TIMEOUT_S = 10.0
_ENDING_S = 30.0


def poison(strategy: str, rank: int, folder: Path) -> Trial:
    """NaN in the gradient of one rank: all skip that step together and the replicas, where there are, stay equal."""
    ended = launch(strategy, _STEPS, folder, [Fault("nan", rank, "nan", SAVE_EVERY + 1)])
    wrong = [f"left behind: {command}" for command in ended.left] + corrupt(ended.run.folder)
    if ended.run.code != 0:
        wrong.append(f"exit code {ended.run.code}")
    else:
        skipped = [line["step"] for line in ended.run.steps if line["skipped"]]
        if skipped != [SAVE_EVERY + 1]:
            wrong.append(f"steps {skipped} were skipped")
    equal = None if strategy_info(strategy).sharded else _replicas_equal(ended, strategy)  # shares differ
    return Trial("NaN on one rank", strategy, not wrong, 1, equal, "; ".join(wrong[:2]))


def stall(strategy: str, rank: int, folder: Path) -> Trial:
    """SIGSTOP: the rank is named, all of the run is ended."""
    fault = Fault("stop", rank, "forward", SAVE_EVERY + 2)
    ended = launch(strategy, _STEPS, folder, [fault], f"parallel.timeout_s={_TIMEOUT_S:g}")
    struck = ended.record.read("struck-0")
    wrong = [f"left behind: {command}" for command in ended.left] + corrupt(ended.run.folder)
    if struck is None:
        wrong.append("it was never stopped")
    elif ended.at - struck["time"] > _TIMEOUT_S + _ENDING_S:
        wrong.append(f"it took {ended.at - struck['time']:.0f} s")
    if ended.run.code in (0, 75) or f"rank {rank} " not in ended.run.stderr.strip().splitlines()[-1]:
        wrong.append(f"exit code {ended.run.code}: {ended.run.stderr.strip().splitlines()[-1:]}")
    return Trial("SIGSTOP: named and ended", strategy, not wrong, problem="; ".join(wrong[:2]))


def _replicas_equal(ended: Ended, strategy: str) -> bool:
    """Whether ranks with the same stage have ended with the same weights."""
    traces = [path for path in ended.record.folder.glob("end-*.json")]
    by_stage: dict[int, set[str]] = {}
    for path in traces:
        told = ended.record.read(path.stem)
        by_stage.setdefault(told["stage"], set()).add(told["weights"])
    return len(traces) == RANKS[strategy] and all(len(found) == 1 for found in by_stage.values())
