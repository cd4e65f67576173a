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
from itertools import chain
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
    "optim.lr=0.2", "scheduler=constant", "train.grad_clip=0.5", "train.global_batch_size=16", "train.precision=fp64",
    "parallel.threads=1", "verify.steps=50",
]  # fmt: skip
_TRACED = [
    *TRANSFORMER, "device=cpu", "train.epochs=null", "train.steps=12", "train.global_batch_size=32",
    "train.precision=fp32", "train.eval_every=null", "train.checkpoint_every=null", "logger=none",
    "parallel=pipelined", "parallel.pp=2", "parallel.schedule=1f1b", "parallel.chunks=8", "parallel.balance=time",
    "parallel.threads=1", "train.trace=true",
]  # fmt: skip
_EPSILON = torch.finfo(torch.float64).eps
_EQUAL = _EPSILON / 1e3  # where a difference of exactly 0 is drawn


def measure(chosen: Namespace) -> Iterator[Table]:
    """Trace a pipeline, verify every strategy, and yield the picture alone."""
    words = [*_WORDS, "verify.steps=3"] if chosen.quick else _WORDS
    with run_directory(*_TRACED) as folder:
        timeline = imread(folder / "timeline.png")
    with run_directory("mode=verify", *words) as folder:
        layouts = json.loads((folder / JSON).read_text())["layouts"]
    curves: dict[str, list[list[float]]] = {}
    for layout in layouts:
        if layout["losses"]:
            curves.setdefault(layout["place"]["name"], []).append(layout["losses"])
    yield Table("promise", [], draw=partial(draw, timeline=timeline, curves=curves))


def draw(path: Path, _: list[dict], timeline: Any, curves: dict[str, list[list[float]]]) -> None:
    """Draw the picture into the file ``path``, with the losses of each strategy's layouts."""
    mosaic = [["pipeline", "pipeline"], ["loss", "difference"]]
    with figure.drawing(path, width=12.0, height=7.2, mosaic=mosaic) as (above, left, right):
        above.imshow(timeline)
        above.axis("off")
        reference = curves["single"][0]
        steps = range(1, len(reference) + 1)
        for losses in chain.from_iterable(curves.values()):
            left.plot(steps, losses, color=figure.BLUE, linewidth=1.5)
        drawn = sum(map(len, curves.values()))
        left.set_title(
            f"the training loss in {drawn} layouts of {len(curves)} strategies: {drawn} lines, one on the other"
        )
        left.set(xlabel="step", ylabel="training loss")
        names = [name for name in curves if name != "single"]
        for at, name in enumerate(names):
            pairs = chain.from_iterable(zip(losses, reference, strict=True) for losses in curves[name])
            differences = [abs(loss - wanted) / abs(wanted) or _EQUAL for loss, wanted in pairs]
            places = [at] * len(differences)
            right.plot(differences, places, "o", color=figure.BLUE, markersize=5, alpha=0.25, markeredgecolor="none")
        right.axvline(_EPSILON, color="black", linestyle="--", linewidth=1)
        right.text(_EPSILON, -0.8, " machine epsilon", ha="left", va="center", fontsize="small")
        right.set(xscale="log", xlim=(_EQUAL / 2, 1e-11), ylim=(len(names) - 0.4, -1.2))
        right.set_yticks(range(len(names)), names)
        powers = {10.0**power: f"$10^{{{power}}}$" for power in range(-16, -10)}
        right.set_xticks([_EQUAL, *powers], ["exactly 0", *powers.values()])
        right.minorticks_off()
        right.set_title("how far each step's loss is from parallel=single")
        right.set(xlabel="relative difference, in fp64")


BENCHMARK = Benchmark(measure)
