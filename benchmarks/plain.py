"""Random programs beside a loop in plain torch.

    python -m benchmarks plain [SEED [COUNT]] [--quick]

Models of random blocks are trained on random data, by random losses, optimizers, schedules and options, in random
layouts, evaluated, resumed and predicted with. A loop in plain torch trains the same. Losses, metrics, norms, rates,
evaluations, the last and the best weights, and predictions are compared. As many programs run at once as there are
cores. A program that differs, hangs, or ends with an error is printed, and at the end as simple as it can be; the exit
code is then 1. Refusals are counted by their sentence.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from benchmarks.table import Benchmark, Table
from common.machine import usable_cores

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from plain.comparison import Outcome, outcome, sentence, shrunk  # noqa: E402
from plain.programs import Program, drawn  # noqa: E402

LIMIT_S = 600


def begin() -> None:
    """Discard what this process prints, and those that it starts; and end it with its parent, even a killed one."""

    def follow() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def ended(program: Program) -> Outcome:
    """How the program ends, within ``LIMIT_S``."""

    def late(*_: object) -> None:
        raise TimeoutError(f"takes longer than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        with tempfile.TemporaryDirectory(prefix="plain-") as folder:
            return outcome(program, Path(folder) / "run")
    finally:
        signal.alarm(0)


def simplest(program: Program, kind: str) -> Program:
    """A program with less that ends in the same way."""
    return shrunk(program, lambda one: ended(one).kind == kind)


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of how programs ended; exits with code 1 if one was bad."""
    found, worst, seed, shrinking = Counter[tuple[str, str]](), 0.0, chosen.seed, []
    programs = [drawn(seed, number) for number in range(3 if chosen.quick else chosen.count)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(usable_cores(), context, begin) as pool:
        for number, (program, result) in enumerate(
            zip(programs, [pool.submit(ended, p) for p in programs], strict=True)
        ):
            try:
                kind, words, difference = result.result(2 * LIMIT_S)
            except (TimeoutError, BrokenProcessPool):
                for worker in multiprocessing.active_children():
                    worker.kill()
                raise SystemExit(f"program {number} of seed {seed} ends without a word: {program}") from None
            found[kind, sentence(words) if kind == "refused" else ""] += 1
            worst = max(worst, difference if program["train.precision"] == "fp64" and kind == "equal" else 0.0)
            print(f"program {number} of seed {seed}: {kind}", words or f"{difference:.0e}", file=sys.stderr, flush=True)
            if kind in ("bad", "crash", "hangs"):
                print(f"    {program}", file=sys.stderr, flush=True)
            if kind in ("bad", "crash"):
                shrinking.append((number, pool.submit(simplest, program, kind)))
        for number, result in shrinking:
            print(f"program {number}, as simple as it can be: {result.result()}", file=sys.stderr, flush=True)
    rows = [{"ended": kind, "said": said, "programs": n} for (kind, said), n in sorted(found.items())]
    yield Table("plain", rows, {"seed": seed, "largest difference in fp64": worst})
    if any(kind in ("bad", "crash", "hangs") for kind, _ in found):
        raise SystemExit(1)


BENCHMARK = Benchmark(measure, numbers={"seed": 1, "count": 100})
