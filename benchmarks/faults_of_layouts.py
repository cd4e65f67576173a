"""Faults of layouts that others have met, and right layouts: what ``mode=verify`` says of each, in fp64, bf16 and fp16.

    python -m benchmarks faults_of_layouts          all of them, three quarters of an hour on two busy cores
    python -m benchmarks faults_of_layouts bf16     the faults in bf16 alone

A fault is found if its layout fails, and named if the sentence about the first difference has the culprit: the layer
and the direction, the parameter, or the kind of number. A right layout is one without a fault: each is compared in bf16
or fp16 with the limits of the runs that measure rounding. ``limit`` is the largest difference divided by its limit.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.table import Benchmark, Table
from launchers.local import start_fork_server
from parallel.layout import Layout
from training.run.prepare import prepare
from training.studies.verification.layouts import Compared, Runs, layouts, variants

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/training/studies/verify"))

from wrong_layouts import MICROBATCHES, MODELS, reference, tried  # noqa: E402

Rows = Iterator[tuple[dict, Compared]]  # what is said of a comparison beside its result


def faults(model: str, runs: Runs) -> Rows:
    """Try the faults of a model."""
    for fault, result, named in tried(model, runs):
        yield {"fault": fault.name, "source": fault.source, "found": result.holds is False, "named": named}, result


def right(model: str, runs: Runs) -> Rows:
    """Compare a model in all layouts of two processes, in other micro-batches, and with recomputation."""
    cases = [(layout, {}) for layout in layouts(2, MICROBATCHES, divided=variants(prepare(runs.cfg)))]
    cases += [] if model == "normed" else [(Layout(chunks=chunks), {}) for chunks in (8, 2)]
    again = {"activation_checkpointing": not runs.cfg.train.activation_checkpointing}
    for layout, changed in [*cases, (Layout(chunks=MICROBATCHES), again)]:
        result = runs.compare(layout, changed)
        if result.holds is not None:
            yield {"holds": result.holds}, result


# The models of each precision in each part.
PARTS = {
    "fp64": (faults, {"fp64": MODELS}),
    "bf16": (faults, {"bf16": MODELS}),
    "right": (right, {"bf16": MODELS, "fp16": ("gpt2", "llama")}),
}


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield a table of the faults for each precision, and one of the right layouts; if ``quick``, of one model."""
    start_fork_server(["training.command.preload", "wrong_layouts"])
    for part in chosen.parts or PARTS:
        what, models = PARTS[part]
        runs = ((model, precision) for precision, some in models.items() for model in some)
        each = (compared(what, *run) for run in runs if not chosen.quick or run[0] == "normed")
        yield Table(f"faults_of_layouts_{part}", (row for rows in each for row in rows))


def compared(what: Callable[[str, Runs], Rows], model: str, precision: str) -> Iterator[dict]:
    """Yield the row of each comparison of a model."""
    with reference(model, precision) as runs:
        for about, result in what(model, runs):
            yield {
                "model": model, "precision": precision, "run": result.name, **about,
                "limit": f"{max(result.ratios.values(), default=0):.2g}",
                "verdict": result.reason.partition("; ")[0] or max(result.ratios, key=lambda kind: result.ratios[kind]),
            }  # fmt: skip


BENCHMARK = Benchmark(measure, parts=[*PARTS])
