"""The README's picture: a pipeline at work, and the loss under every strategy with its difference from one device's.

    python -m benchmarks promise [--quick]

trains a Transformer in a balanced pipeline, and a smaller one with dropout under each strategy, and writes
results/promise.png.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import figure
from benchmarks.command_line import run_directory
from benchmarks.table import Benchmark, Table
from benchmarks.trainer import TRANSFORMER
from parallel.timeline import Interval
from training.reporting.timeline import diagram

_WORDS = [
    "model=transformer", "model.d_model=64", "model.d_hid=256", "model.n_layer=4", "model.dropout=0.2",
    "data.max_vocabulary=4096", "data.seq_len=64", "device=cpu", "logger=none", "optim=sgd", "optim.momentum=0.9",
    "optim.lr=0.2", "scheduler=constant", "train.grad_clip=0.5", "train.global_batch_size=16", "train.precision=fp32",
    "parallel.threads=1", "verify.steps=50",
]  # fmt: skip
_TRACED = [
    *TRANSFORMER, "device=cpu", "train.epochs=null", "train.steps=12", "train.global_batch_size=32",
    "train.precision=fp32", "train.eval_every=null", "train.checkpoint_every=null", "logger=none",
    "parallel=pipelined", "parallel.pp=2", "parallel.schedule=1f1b", "parallel.chunks=8", "parallel.balance=time",
    "parallel.threads=1", "train.trace=true",
]  # fmt: skip
_EQUAL = 1e-9  # where a difference of 0 is drawn


def measure(chosen: Namespace) -> Iterator[Table]:
    """Train under each strategy, and yield the picture alone."""
    words = [*_WORDS, "verify.steps=3"] if chosen.quick else _WORDS
    with run_directory(*_TRACED) as folder:
        ranks = step(folder / "timeline.json")
        summary = json.loads((folder / "summary.json").read_text())
    bubbles = summary["bubble_fraction"], summary["ideal_bubble_fraction"]
    print(f"bubble {bubbles[0]:.1%}, ideal {bubbles[1]:.1%}", file=sys.stderr)
    with run_directory("mode=verify", *words) as folder:
        layouts = json.loads((folder / "certificate.json").read_text())["layouts"]
    curves: dict[str, list[float]] = {}
    for layout in layouts:
        if layout["losses"]:
            curves.setdefault(layout["place"]["name"], layout["losses"])
    yield Table("promise", [], draw=partial(draw, ranks=ranks, bubbles=bubbles, curves=curves))


def step(path: Path) -> dict[int, list[Interval]]:
    """Return the intervals of one step of a timeline.json by rank, in seconds."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    number = sorted({event["args"]["step"] for event in events})[0]
    ranks: dict[int, list[Interval]] = {}
    for event in events:
        about = event["args"]
        if about["step"] == number:
            kind = event["name"].rsplit(" ", 1)[0].replace(" ", "_")
            start = event["ts"] / 1e6
            interval = Interval(kind, about["stage"], about["microbatch"], start, start + event["dur"] / 1e6)
            ranks.setdefault(event["tid"] // 100, []).append(interval)
    return dict(sorted(ranks.items()))


def draw(
    path: Path,
    _: list[dict],
    ranks: dict[int, list[Interval]],
    bubbles: tuple[float, float],
    curves: dict[str, list[float]],
) -> None:
    """Draw the picture into the file ``path``."""
    mosaic = [["pipeline", "loss"], ["pipeline", "difference"]]
    with figure.drawing(path, width=13.0, mosaic=mosaic, heights=(1, 1.2)) as (left, above, below):
        below.sharex(above)
        handles = diagram(left, ranks, width=5.5)
        left.set_title(
            f"one step of parallel=pipelined, measured: {bubbles[0]:.0%} of it idle (ideal: {bubbles[1]:.0%})",
            fontsize="medium",
        )
        left.legend(handles=handles[:3], loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)

        reference = curves["single"]
        steps = range(1, len(reference) + 1)
        above.plot(steps, reference, color="black", linewidth=1.5)
        above.set_title("the loss of parallel=single", fontsize="medium")
        above.set_ylabel("training loss")
        above.tick_params(labelbottom=False)
        others = {name: losses for name, losses in curves.items() if name != "single"}
        for (name, losses), marker in zip(others.items(), "os^vD*PX", strict=False):
            apart = [abs(a - b) / abs(b) or _EQUAL for a, b in zip(losses, reference, strict=True)]
            below.plot(steps, apart, marker, label=name, markersize=4, alpha=0.7)
        below.axhline(torch.finfo(torch.float32).eps, color="black", linestyle="--", linewidth=1)
        below.text(len(reference), torch.finfo(torch.float32).eps, "float32's epsilon", ha="right", va="bottom")
        below.set_yscale("log")
        below.set_ylim(_EQUAL / 2, 1e-2)
        below.set_title("every other strategy: |difference from single| / loss", fontsize="medium")
        below.set(xlabel="step")
        below.legend(frameon=False, ncols=4, fontsize="small", loc="upper center")


BENCHMARK = Benchmark(measure)
