"""The promise in numbers: ``mode=verify`` of every model of conf/model, under every strategy and schedule.

    python -m benchmarks parity            verifies them, writes results/parity.csv
    python -m benchmarks readme            puts the results into README.md and docs/

Each model is verified by a real command line; the table has a row for each layout that was run.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator

from benchmarks.command_line import run_directory
from benchmarks.table import Benchmark, Table
from conf import options
from training.studies.verification.report import JSON

WORDS = ["device=cpu", "logger=none"]
# Smaller than they come, and with dropout and clipping; a model that is not named here is verified as it comes.
SIZES = {
    "resnet50": ["data.image_size=64", "data.samples=160"],
    "transformer": ["train.grad_clip=0.5"],
    "llama": ["data.seq_len=64", "train.grad_clip=0.5"],
    "gpt2": ["model.size=tiny", "model.dropout=0.1", "data.seq_len=64", "train.grad_clip=0.5"],
}


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all models, of the toy if ``quick``."""
    words = {model: " ".join(WORDS + SIZES.get(model, [])) for model in options("model")}
    yield Table("parity", (row for model in (["toy"] if chosen.quick else words) for row in rows(model)), words)


def rows(model: str) -> Iterator[dict]:
    """Verify a model, and yield a row for each of its layouts."""
    with run_directory("mode=verify", f"model={model}", *WORDS, *SIZES.get(model, [])) as folder:
        certificate = json.loads((folder / JSON).read_text())
    for layout in certificate["layouts"]:
        if layout["holds"] is not None:
            sizes = {kind: f"{layout['differences'].get(kind, [0.0])[0]:.0e}" for kind in certificate["limits"]}
            yield {"model": model, "parameters": certificate["parameters"], "run": layout["name"], **sizes}


BENCHMARK = Benchmark(measure)
