"""The figures of PyTorch's tutorial on model parallelism, measured here: seconds over the split size.

    python -m benchmarks published_figures [--rounds 4] [--quick]

ResNet-50 on batches of 120 random 128x128 images, squared error, SGD; two stages, up to layer2 and from layer3 on
(``parallel.balance=[11,11]``), on two GPUs if the machine has them, else in two processes on one core each. Published,
on two GPUs, for three batches: single 3.75 s, model parallel 4.02 s, pipelined 2.51 s (split size 20), best 2.43 s
(12).

Source: "Single-Machine Model Parallel Best Practices" (PyTorch tutorials). Its chart 1 compares a single device with
model parallel, chart 2 adds pipelining, chart 3 plots the split size. Here they are one figure.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks import figure, ranks
from benchmarks.table import Benchmark, Table
from benchmarks.timing import Spread, tabulate
from benchmarks.trainer import in_turns

SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)  # images in a micro-batch, as published
SINGLE, NAIVE, PIPELINED = "single device", "model parallel", "pipelined"
GPUS = ranks.device_type() == "cuda"


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all split sizes."""
    batch, image, splits = (24, 64, (4, 12)) if chosen.quick else (120, 128, SPLITS)
    seconds = ranks.run(in_turns, layouts(batch, image, splits), chosen.rounds, SINGLE)
    where = "two GPUs" if GPUS else "two cores, one thread a process"
    about = {"batch": batch, "repeats": chosen.rounds, "where": where}
    yield Table("published_figures", rows_of(seconds, batch), about, partial(draw, where=where))


def layouts(batch: int, image: int, splits: tuple[int, ...]) -> dict[str, list[str]]:
    """Return the command line of each run by its name: SINGLE, NAIVE, and the split sizes."""
    common = [
        "model=resnet50", f"data.image_size={image}", f"train.global_batch_size={batch}", "train.precision=fp32",
        f"device={ranks.device_type()}", "logger=none",
    ]  # fmt: skip
    pipeline = [*common, "parallel=pipelined", "parallel.pp=2", "parallel.balance=[11,11]"]
    chunks = {NAIVE: 1} | {str(split): batch // split for split in splits}
    runs = {name: [*pipeline, f"parallel.chunks={count}"] for name, count in chunks.items()}
    return {SINGLE: [*common, "parallel=single"], **runs}


def rows_of(seconds: dict[str, list[float]], batch: int) -> list[dict]:
    """Return one row per run; ``against single`` is the gain in throughput over one device."""
    single = Spread.of(seconds[SINGLE]).median

    def columns(name: str, spread: Spread) -> dict[str, object]:
        split = "" if name in (SINGLE, NAIVE) else int(name)
        return {
            "run": PIPELINED if split else name,
            "split size": split,
            "mean": f"{statistics.mean(seconds[name]):.3f}",
            "standard deviation": f"{statistics.pstdev(seconds[name]):.3f}",
            "images/s": f"{batch / spread.median:.2f}",
            "against single": f"{single / spread.median - 1:+.0%}",
        }

    return tabulate(seconds, columns)


def draw(path: Path, rows: list[dict], where: str) -> None:
    """Draw the curve over the split size, beside one device and model parallel."""
    by_split = {int(row["split size"]): row for row in rows if row["split size"]}
    single, naive = (next(float(row["mean"]) for row in rows if row["run"] == run) for run in (SINGLE, NAIVE))
    sizes = sorted(by_split)
    means, deviations = ([float(by_split[n][key]) for n in sizes] for key in ("mean", "standard deviation"))
    with figure.drawing(path, width=8.0) as (axes,):
        axes.errorbar(sizes, means, deviations, fmt="o-", color=figure.BLUE, label=PIPELINED)
        axes.axhline(single, color="black", linestyle="--", linewidth=1, label=f"{SINGLE} {single:.1f} s")
        axes.axhline(naive, color="black", linestyle=":", linewidth=1, label=f"{NAIVE} {naive:.1f} s")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("split size: images in a micro-batch")
        axes.set_ylabel("seconds a batch: mean and standard deviation")
        axes.set_title(f"ResNet-50, {where}")
        axes.legend()


BENCHMARK = Benchmark(measure, rounds=10 if GPUS else 4)
