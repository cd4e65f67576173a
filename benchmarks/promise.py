"""The README's picture: a pipeline at work, and the loss under every strategy with its difference from one device's.

    python -m benchmarks promise [--quick]

trains a Transformer in a balanced pipeline, and a smaller one with dropout under each strategy, and writes
results/promise.png.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.image import imread

from benchmarks import figure
from benchmarks.command_line import run_directory
from benchmarks.table import Benchmark, Table
from benchmarks.trainer import TRANSFORMER
from training.studies.verification.report import JSON

_WORDS = [
    "model=transformer", "model.d_model=64", "model.d_hid=256", "model.n_layer=4", "model.dropout=0.2",
    "data.max_vocabulary=4096", "data.seq_len=64", "device=cpu", "logger=none", "optim=sgd", "optim.momentum=0.9",
    "optim.lr=0.2", "scheduler=constant", "train.grad_clip=0.5", "train.global_batch_size=16", "train.precision=fp32",
    # In fp32 an activation may fall on the other side of zero, which changes a gradient by more than rounding.
    "parallel.threads=1", "verify.steps=50", "verify.tolerance=1e-3",
]  # fmt: skip
_TRACED = [
    *TRANSFORMER, "device=cpu", "train.epochs=null", "train.steps=12", "train.global_batch_size=32",
    "train.precision=fp32", "train.eval_every=null", "train.checkpoint_every=null", "logger=none",
    "parallel=pipelined", "parallel.pp=2", "parallel.schedule=1f1b", "parallel.chunks=8", "parallel.balance=time",
    "parallel.threads=1", "train.trace=true",
]  # fmt: skip
_EQUAL = 1e-9  # where a difference of 0 is drawn


def measure(chosen: Namespace) -> Iterator[Table]:
    """Trace a pipeline, verify every strategy, and yield the picture alone."""
    words = [*_WORDS, "verify.steps=3"] if chosen.quick else _WORDS
    with run_directory(*_TRACED) as folder:
        timeline = imread(folder / "timeline.png")
    with run_directory("mode=verify", *words) as folder:
        layouts = json.loads((folder / JSON).read_text())["layouts"]
    curves: dict[str, list[float]] = {}
    for layout in layouts:
        if layout["losses"]:
            curves.setdefault(layout["place"]["name"], layout["losses"])
    yield Table("promise", [], draw=partial(draw, timeline=timeline, curves=curves))


def draw(path: Path, _: list[dict], timeline: Any, curves: dict[str, list[float]]) -> None:
    """Draw the picture into the file ``path``."""
    mosaic = [["pipeline", "pipeline"], ["loss", "difference"]]
    with figure.drawing(path, width=12.0, height=6.8, mosaic=mosaic) as (above, left, below):
        above.imshow(timeline)
        above.axis("off")
        reference = curves["single"]
        steps = range(1, len(reference) + 1)
        left.plot(steps, reference, color="black", linewidth=1.5)
        left.set_title("the loss of parallel=single")
        left.set(xlabel="step", ylabel="training loss")
        others = {name: losses for name, losses in curves.items() if name != "single"}
        for (name, losses), marker in zip(others.items(), "os^vD*PX", strict=False):
            apart = [abs(a - b) / abs(b) or _EQUAL for a, b in zip(losses, reference, strict=True)]
            below.plot(steps, apart, marker, label=name, markersize=4, alpha=0.7)
        below.axhline(torch.finfo(torch.float32).eps, color="black", linestyle="--", linewidth=1)
        below.text(len(reference), torch.finfo(torch.float32).eps, "float32's epsilon", ha="right", va="bottom")
        below.set_yscale("log")
        below.set_ylim(_EQUAL / 2, 1e-2)
        below.set_title("every other strategy: |difference from single| / loss")
        below.set(xlabel="step")
        below.legend(ncols=4, loc="upper center")


BENCHMARK = Benchmark(measure)
