"""Random programs beside a loop in plain torch.

    python -m benchmarks plain [SEED [COUNT]] [--quick]

Models of random blocks are trained on random data, by random losses, optimizers, schedules and options, in random
layouts, evaluated, resumed and predicted with. A loop in plain torch trains the same. Losses, metrics, norms, rates,
evaluations, the last and the best weights, and predictions are compared. A program that differs, or whose run ends with
an error, is made as simple as it can be and printed; the exit code is then 1. Refusals are counted by their sentence.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.table import Benchmark, Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from plain.loop import Outcome, outcome, sentence, shrunk  # noqa: E402
from plain.programs import Program, drawn  # noqa: E402


def quietly(program: Program, folder: Path) -> Outcome:
    """How the program ends, without what its runs print, also those of other processes."""
    sys.stdout.flush()
    before, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        return outcome(program, folder)
    finally:
        sys.stdout.flush()
        for number, descriptor in enumerate(before, 1):
            os.dup2(descriptor, number)
        for descriptor in (*before, nowhere):
            os.close(descriptor)


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of how programs ended; exits with code 1 if one was bad."""
    found, worst, seed = Counter[tuple[str, str]](), 0.0, chosen.seed
    with tempfile.TemporaryDirectory(prefix="plain-") as folder:
        ended = partial(quietly, folder=Path(folder) / "run")
        for number in range(3 if chosen.quick else chosen.count):
            program = drawn(seed, number)
            result = ended(program)
            found[result.kind, sentence(result.words) if result.kind == "refused" else ""] += 1
            worst = max(worst, result.difference if program.precision == "fp64" and result.kind == "equal" else 0.0)
            if result.kind in ("bad", "crash"):
                program = shrunk(program, lambda one, kind=result.kind: ended(one).kind == kind)
                print(f"program {number} of seed {seed}: {result.words}\n    {program}", file=sys.stderr, flush=True)
    rows = [{"ended": kind, "said": said, "programs": n} for (kind, said), n in sorted(found.items())]
    yield Table("plain", rows, {"seed": seed, "largest difference in fp64": worst})
    if any(kind in ("bad", "crash") for kind, _ in found):
        raise SystemExit(1)


BENCHMARK = Benchmark(measure, numbers={"seed": 1, "count": 100})
