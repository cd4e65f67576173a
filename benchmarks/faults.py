"""Hundreds of faults: runs that are killed, stopped, stalled and damaged, and how each of them ends.

    python -m benchmarks faults [PART …] [--quick]     (PART: kill, kill-ddp, nan, …)

Each rank is killed (SIGKILL) at each point of a step and in each phase of a save, under each strategy; a run is told
to stop at random moments; files of its newest checkpoint are damaged; one rank's gradient is not a number; one rank
stalls; a run of 20,000 steps ends with the memory and the descriptors with which it began. Steps lost: steps
recomputed after the restart. Bits equal: the final checkpoint's files and all losses are those of an undisturbed run
(NaN: the replicas' weights are equal). About twenty minutes on two cores.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.table import Benchmark, Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from faults.plan import Trial, rows  # noqa: E402
from faults.runs import RANKS  # noqa: E402
from faults.trials import DAMAGES, damage, every_kill, interrupt, kill, moments, poison, soak, spaced, stall  # noqa: E402

STRATEGIES = ("ddp", "pipelined", "pipe_ddp", "fsdp")
_AT_ONCE = 12  # kills that one run meets
_SIGNALS = {"single": 8, "ddp": 6, "pipe_ddp": 6}
PARTS = (
    *(f"{kind}-{strategy}" for kind in ("kill", "nan", "stall") for strategy in STRATEGIES),
    *(f"term-{strategy}" for strategy in _SIGNALS), "damage-single", "soak-single",
)  # fmt: skip


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all faults; exits with code 1 if a run ended in another way than it should."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the current run too
    trials: list[Trial] = []
    for name, group in groups(chosen.quick):
        if not name.startswith(tuple(chosen.parts or PARTS)):
            continue
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            new = group(Path(folder))
        trials += new
        bad = [trial for trial in new if trial.problem]
        print(f"{name}: {len(new)} faults, {len(bad)} with problems", file=sys.stderr, flush=True)
        for trial in bad:
            print(f"    {trial.fault}: {trial.problem}", file=sys.stderr, flush=True)
    yield Table("faults", rows(trials))
    if any(trial.problem or not trial.survived or trial.equal is False for trial in trials):
        raise SystemExit(1)


def groups(quick: bool) -> Iterator[tuple[str, Callable[[Path], list[Trial]]]]:
    """Yield groups of faults of a few minutes each: the name, and a function that runs it in a folder of its own."""
    for strategy in STRATEGIES[:1] if quick else STRATEGIES:
        ranks = range(1 if quick else RANKS[strategy])
        faults = every_kill(strategy)[:2] if quick else every_kill(strategy)
        for start in range(0, len(faults), _AT_ONCE):
            part = faults[start : start + _AT_ONCE]
            yield f"kill-{strategy}-{start:03d}", lambda f, s=strategy, p=part: kill(s, spaced(p), f)
        for rank in ranks:
            yield f"nan-{strategy}-{rank}", lambda f, s=strategy, r=rank: [poison(s, r, f)]
            yield f"stall-{strategy}-{rank}", lambda f, s=strategy, r=rank: [stall(s, r, f)]
    for strategy, count in _SIGNALS.items() if not quick else [("single", 1)]:
        times = moments(strategy, count, seed=count)
        yield f"term-{strategy}", lambda f, s=strategy, t=times: interrupt(s, t, f)
    some = {"damages": list(DAMAGES)[:1], "files": ["model-00.safetensors"]} if quick else {}
    yield "damage-single", lambda f: damage("single", f, **some)
    yield "soak-single", lambda f: [soak(1_000 if quick else 20_000, f)]


BENCHMARK = Benchmark(measure, parts=PARTS, one_table=True)
