"""Two processes that share every layer against one process with both cores.

    python -m benchmarks tensor [--rounds 3] [--quick]

GPT-2 124M and a Llama of that size, by train.py as it is; the runs of a round follow each other, and ratios are medians
over rounds.
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Iterator

from benchmarks.command_line import run_directory
from benchmarks.table import Benchmark, Table
from training.reporting.metrics import SUMMARY

MODELS = {
    "gpt2 124M": ["model=gpt2"],
    "llama 135M, 8 heads": ["model=llama", "model.size=135M", "model.n_head=8", "model.kv_heads=4"],
}
LAYOUTS = {
    "single, two threads": ["parallel=single", "parallel.threads=2"],
    "tensor, tp=2": ["parallel=tensor", "parallel.threads=1"],
    "tensor, tp=2, sequence": ["parallel=tensor", "parallel.sequence=true", "parallel.threads=1"],
}
COMMON = [
    "data=stdlib", "train.precision=fp32", "train.epochs=null", "train.eval_every=null", "train.checkpoint_every=null",
    "logger=none", "device=cpu",
]  # fmt: skip


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all models."""
    length, batch, steps = (16, 2, 2) if chosen.quick else (256, 4, 4)
    words = [*COMMON, f"data.seq_len={length}", f"train.global_batch_size={batch}", f"train.steps={steps}"]
    models = {"gpt2 tiny": ["model=gpt2", "model.size=tiny"]} if chosen.quick else MODELS
    about = {"rounds": chosen.rounds, "words": words}
    yield Table("tensor", (row for name in models for row in rows(name, models[name], words, chosen.rounds)), about)


def rows(name: str, model: list[str], words: list[str], rounds: int) -> Iterator[dict]:
    """Train a model in each layout, in turns, and yield a row for each."""
    summaries: dict[str, list[dict]] = {layout: [] for layout in LAYOUTS}
    for _ in range(rounds):
        for layout, more in LAYOUTS.items():
            with run_directory(*model, *words, *more) as folder:
                summaries[layout].append(json.loads((folder / SUMMARY).read_text()))
    alone = summaries[next(iter(LAYOUTS))]
    for layout, several in summaries.items():
        seconds = [summary["step_time_s"] for summary in several]
        ratios = [one["step_time_s"] / summary["step_time_s"] for one, summary in zip(alone, several, strict=True)]
        yield {
            "model": name,
            "run": layout,
            "seconds a step (median)": f"{statistics.median(seconds):.3f}",
            "times single": f"{statistics.median(ratios):.2f}",
            "GiB of the fullest rank": f"{max(max(s['peak_memory_bytes']) for s in several) / 2**30:.2f}",
            "MiB of weights of a rank": f"{several[0]['weights_bytes'][0] / 2**20:.0f}",
        }


BENCHMARK = Benchmark(measure, rounds=3)
