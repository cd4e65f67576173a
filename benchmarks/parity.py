"""The promise in numbers: ``mode=verify`` of every model of conf/model, under every strategy and schedule.

    python -m benchmarks parity            verifies them, writes results/parity.csv and results/parity_tensor.csv
    python -m benchmarks parity tensor     only the layouts of up to 8 processes in which ranks share layers
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
from parallel.axes import AXES
from parallel.axes.axis import AxisOfStage
from training.studies.verification.layouts import layouts
from training.studies.verification.report import JSON

WORDS = ["device=cpu", "logger=none"]
PARTS = ("all", "tensor")
CUT = ("gpt2", "llama", "transformer")  # whose layers can be cut
PROCESSES, MICROBATCHES = 8, 4
# Smaller than they come, and with dropout and clipping; a model that is not named here is verified as it comes.
SIZES = {
    "resnet50": ["data.image_size=64", "data.samples=160"],
    "transformer": ["train.grad_clip=0.5"],
    "llama": ["data.seq_len=64", "train.grad_clip=0.5"],
    "gpt2": ["model.size=tiny", "model.dropout=0.1", "data.seq_len=64", "train.grad_clip=0.5"],
}


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the tables of all models; if ``quick``, that of the toy."""
    words = {model: " ".join(WORDS + SIZES.get(model, [])) for model in options("model")}
    if "all" in (parts := chosen.parts or PARTS):
        yield Table("parity", (row for model in (["toy"] if chosen.quick else words) for row in rows(model)), words)
    if "tensor" in parts and not chosen.quick:
        shared = {model: f"{words[model]} verify.processes={PROCESSES}" for model in CUT}
        divided = [keys for axis in AXES if issubclass(axis, AxisOfStage) for keys in axis.variants]
        divided = [layout for layout in layouts(PROCESSES, MICROBATCHES, divided) if layout.ranks_per_stage > 1]
        typed = [[*x.words(), *[f"parallel.shard={x.shard}"] * (x.shard is not None)] for x in divided]
        found = (row for model in CUT for layout in typed for row in [*rows(model, *layout)][1:])
        yield Table("parity_tensor", found, shared)


def rows(model: str, *layout: str) -> Iterator[dict]:
    """Verify a model in all layouts or in the typed one, and yield a row for each, the first for one process."""
    with run_directory("mode=verify", f"model={model}", *WORDS, *SIZES.get(model, []), *layout) as folder:
        certificate = json.loads((folder / JSON).read_text())
    for compared in certificate["layouts"]:
        if compared["holds"] is not None:
            sizes = {kind: f"{compared['differences'].get(kind, [0.0])[0]:.0e}" for kind in certificate["limits"]}
            yield {"model": model, "parameters": certificate["parameters"], "run": compared["name"], **sizes}


BENCHMARK = Benchmark(measure, parts=PARTS)
