"""The README's first command: how long it takes, and what it learns.

    python -m benchmarks first_run [--quick]

Runs ``python train.py parallel=pipe_ddp model=gpt2`` and evaluates its checkpoint on the whole validation and test
splits. Writes results/first_run.csv with the seconds of its parts, and first_run.png with its loss.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks import figure
from benchmarks.command_line import run
from benchmarks.table import Benchmark, Table
from training.reporting.metrics import METRICS, read_records

COMMAND = ("parallel=pipe_ddp", "model=gpt2")
TINY = ("model.size=tiny", "train.steps=8", "logger=none")
SMOOTHED = 3  # steps that a point of the smoothed curve is the mean of


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of the command's parts, with what it has learned."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        start = time.time()
        lines = run(*COMMAND, *(TINY if chosen.quick else ()), f"hydra.run.dir={run_dir}", echo=True)
        records = read_records(run_dir / METRICS)
        run("mode=eval", f"checkpoint={run_dir}", COMMAND[0], f"hydra.run.dir={folder}/eval", echo=True)
        whole = json.loads(Path(folder, "eval", "summary.json").read_text())
    steps = [record for record in records if "loss" in record]
    losses, seconds = [step["loss"] for step in steps], [step["step_time_s"] for step in steps]
    begun = next(moment for moment, line in lines if re.match(r"step +1/", line)) - seconds[0]
    entropy = next(match[1] for _, line in lines if (match := re.search(r"unigram entropy ([\d.]+)", line)))
    learned = {
        "unigram entropy": float(entropy),
        "validation loss": whole["best_val_loss"],
        "test loss": whole["test_loss"],
    }
    parts = {
        "imports, checks, plan, processes, building": begun - start,
        f"{len(seconds)} steps": sum(seconds),
        "evaluations, checkpoint, sample": lines[-1][0] - begun - sum(seconds),
        "the whole command": lines[-1][0] - start,
    }
    rows = [{"part": name, "seconds": f"{value:.1f}"} for name, value in parts.items()]
    rates = [step["tokens_per_s"] for step in steps[1:]]
    about = {"command": " ".join(("train.py", *COMMAND)), "losses": losses, **learned}
    about["tokens/s"] = statistics.median(rates)
    yield Table("first_run", rows, about, partial(draw, losses=losses, learned=learned))


def draw(path: Path, _: list[dict], losses: list[float], learned: dict[str, float]) -> None:
    """Draw the loss by step, smoothed too, and what it can be compared with."""
    with figure.drawing(path, width=7.0) as (axes,):
        axes.plot(range(1, len(losses) + 1), losses, "o", color=figure.GRAY, markersize=4, label="loss of each step")
        smooth = [statistics.mean(losses[end - SMOOTHED : end]) for end in range(SMOOTHED, len(losses) + 1)]
        centres = [end - (SMOOTHED - 1) / 2 for end in range(SMOOTHED, len(losses) + 1)]
        axes.plot(centres, smooth, color=figure.BLUE, linewidth=2, label=f"mean of {SMOOTHED} steps")
        for (name, value), style in zip(learned.items(), ("--", "-.", ":"), strict=True):
            axes.axhline(value, color="black", linestyle=style, linewidth=1, label=f"{name} {value:.3f}")
        axes.set(xlabel="step", ylabel="nats per token")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend()


BENCHMARK = Benchmark(measure)
