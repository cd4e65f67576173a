"""Faults of layouts that others have met, and right layouts: what ``mode=verify`` says of each, in fp64, bf16 and fp16.

    python -m benchmarks faults_of_layouts          all of them, about half an hour on two cores
    python -m benchmarks faults_of_layouts bf16     the faults in bf16 alone

A fault is found if its layout fails, and named if the sentence about the first difference has the culprit: the layer
and the direction, the parameter, or the kind of number. A right layout is one without a fault: each is compared in bf16
or fp16 with the limits of the runs that measure rounding. ``limit`` is the largest difference divided by its limit.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from benchmarks.table import Benchmark, Table
from launchers.local import start_fork_server
from parallel.layout import Layout
from training.run.prepare import prepare
from training.studies.verification.layouts import layouts, variants

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from wrong_layouts import FAULTS, MICROBATCHES, MODELS, reference, tried  # noqa: E402

SEEDS = (("bf16", 0), ("fp16", 0), ("bf16", 1))  # of the right layouts
PARTS = ("fp64", "bf16", "right")


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield a table of the faults for each precision, and one of the right layouts; if ``quick``, of one model."""
    start_fork_server(["training.command.preload", "wrong_layouts"])
    parts, models = chosen.parts or PARTS, ["normed"] if chosen.quick else [*MODELS]
    for precision in ("fp64", "bf16"):
        if precision in parts:
            yield Table(f"faults_of_layouts_{precision}", (row for model in models for row in faults(model, precision)))
    if "right" in parts:
        runs = ((model, precision, seed) for precision, seed in SEEDS for model in models)
        yield Table("right_layouts", (row for one in runs for row in right(*one)))


def faults(model: str, precision: str) -> Iterator[dict]:
    """Try the faults of a model."""
    of_model = [fault for fault in FAULTS.values() if fault.model == model]
    with tempfile.TemporaryDirectory() as folder, reference(model, precision, Path(folder)) as runs:
        for fault in of_model:
            result, named = tried(fault, runs)
            yield {
                "fault": fault.name, "source": fault.source, "model": model, "run": result.name,
                "found": result.holds is False, "named": named,
                "limit": f"{max(result.ratios.values(), default=0):.2g}",
                "verdict": result.reason.partition("; ")[0],
            }  # fmt: skip


def right(model: str, precision: str, seed: int) -> Iterator[dict]:
    """Compare a model in all layouts of two processes, in other micro-batches, and with recomputation."""
    with tempfile.TemporaryDirectory() as folder, reference(model, precision, Path(folder), seed) as runs:
        cases = [(layout, {}) for layout in layouts(2, MICROBATCHES, divided=variants(prepare(runs.cfg)))]
        cases += [] if model == "normed" else [(Layout(chunks=chunks), {}) for chunks in (8, 2)]
        again = not runs.cfg.train.activation_checkpointing
        for layout, changed in [*cases, (Layout(chunks=MICROBATCHES), {"activation_checkpointing": again})]:
            result = runs.compare(layout, changed)
            if result.holds is not None:
                at = max(result.ratios, key=lambda kind: result.ratios[kind]) if result.ratios else result.reason
                yield {
                    "model": model, "precision": precision, "seed": seed, "run": result.name, "holds": result.holds,
                    "limit": f"{max(result.ratios.values(), default=0):.2g}", "kind": at,
                }  # fmt: skip


BENCHMARK = Benchmark(measure, parts=PARTS)
