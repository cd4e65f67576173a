"""``mode=compare``: a run of each strategy's best layout on this machine, compared with its prediction."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from common.errors import TrainingError
from conf.instantiate import with_values
from conf.schema import Root
from launchers import World
from planner.search import Candidate, Found
from training.reporting import describe
from training.reporting.console import columns
from training.reporting.metrics import write_json
from training.reporting.page import render
from training.reporting.progress import progress
from training.studies.planning import AUTO
from training.studies.planning.choice import predict_here
from training.studies.planning.paper import best_of_each, command, timeline_of
from training.studies.planning.trial import Trial, try_layout

JSON, PAGE, BARS, TIMELINES = "comparison.json", "comparison.html", "comparison.png", "timelines.png"
PARTS = ("compute", "bubble", "communication")
_PAIRS = [f"{what}, {which}" for what in (*PARTS, "GiB") for which in "pm"]  # predicted and measured
_PROCESSES = (1, 2, 4)  # on a CPU
_SECONDS = 3.0  # duration of a trial
_NAME = 22  # characters per line of the names beside the bars


@dataclass(frozen=True)
class Row:
    """A strategy's best layout.

    Attributes:
        best: The layout with its predictions.
        trial: The measurements of the layout.
    """

    best: Candidate
    trial: Trial

    @property
    def predicted(self) -> dict[str, float]:
        """The predicted seconds of a step, by ``PARTS``. The optimizer is part of compute."""
        one = self.best.seconds
        compute = one.compute + one.optimizer
        return dict(zip(PARTS, (compute, one.bubble, max(0.0, one.total - compute - one.bubble)), strict=True))

    @property
    def measured(self) -> dict[str, float]:
        """The measured seconds of a step, by ``PARTS``. Communication is the rest of the step."""
        trial = self.trial
        compute = min(trial.busy if trial.busy is not None else trial.seconds, trial.seconds)
        bubble = min(trial.idle or 0.0, trial.seconds - compute)
        rest = max(0.0, trial.seconds - compute - bubble)  # without a rounding error below 0
        return dict(zip(PARTS, (compute, bubble, rest), strict=True))

    @property
    def off(self) -> float:
        """The relative error of the predicted seconds."""
        return self.best.seconds.total / self.trial.seconds - 1


def compare(cfg: Root, run_dir: Path, world: World | None, words: Sequence[str] = ()) -> str:
    """Measure, predict, and run the best layout of each strategy; write a table, a chart and a page.

    Args:
        cfg: The configuration.
        run_dir: The run directory, where the files are written.
        world: The ranks if they exist already; None if this process starts them.
        words: The command line, for the commands to copy.

    Returns:
        The text to print at the end.

    Raises:
        TrainingError: If the ranks exist already, or no layout runs.
    """
    if world is not None or cfg.launcher.name != "local":
        raise TrainingError("mode=compare starts its processes itself: launcher=local, without torchrun or srun")
    cfg = with_values(cfg, {"parallel.name": AUTO})
    found, _ = predict_here(cfg, () if torch.accelerator.is_available() else _PROCESSES)
    rows, since, tried = [], time.monotonic(), to_try(found)
    for number, best in enumerate(tried, 1):
        trial = try_layout(cfg, best, _SECONDS)
        measured = f"failed: {trial.problem}" if trial.problem else f"measured {trial.seconds:.3g} s"
        predicted = f"predicted {best.seconds.total:.3g} s a step, {measured}"
        print(f"  {progress(number, len(tried), since)}  {best.name}: {predicted}", flush=True)
        rows.append(Row(best, trial))
    problems = [f"{row.best.layout.strategy}: {row.trial.problem}" for row in rows if row.trial.problem]
    rows = sorted((row for row in rows if not row.trial.problem), key=lambda row: row.trial.seconds)
    if not rows:
        raise TrainingError("; ".join(problems))
    text = "\n".join(["", table(rows), "", sentence(rows)])
    commands = [command(words, row.best) for row in rows]
    write(rows, f"{cfg.model.name}, {cfg.train.global_batch_size:,} samples a step", commands, problems, run_dir)
    return f"{text}\n{commands[0]}\n{run_dir / PAGE}"


def to_try(found: Found) -> list[Candidate]:
    """Return the best layout of each strategy, and the default layout: single with chunks=1."""
    best = [*best_of_each(found).values()]
    default = [each for each in found.best if (each.layout.strategy, each.layout.chunks) == ("single", 1)][:1]
    return [*best, *(candidate for candidate in default if candidate not in best)]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text: predicted and measured seconds and parts, and the fullest rank's memory."""
    head = ["layout", "seconds", "measured", "off"]
    head += [word for part in PARTS for word in (part, "measured")] + ["GiB", "measured"]
    return columns([head, *(cells(row) for row in rows)])


def cells(row: Row) -> list[str]:
    """Return a row of ``table``."""
    parts = [f"{size:.3g}" for part in PARTS for size in (row.predicted[part], row.measured[part])]
    memory = [f"{size / 2**30:.2f}" for size in (row.best.memory.total, row.trial.peak)]
    both = f"{row.best.seconds.total:.3g}", f"{row.trial.seconds:.3g}", f"{row.off:+.0%}"
    return [row.best.name, *both, *parts, *memory]


def sentence(rows: Sequence[Row]) -> str:
    """Return a sentence about the fastest layout and the layout with the least memory."""
    best, *others = rows
    off = sum(abs(row.off) for row in rows) / len(rows)
    small, text = min(rows, key=lambda row: row.trial.peak), f"{best.best.name} is the fastest here"
    if others:
        text += f", {others[0].trial.seconds / best.trial.seconds:.2f} times as fast as {others[0].best.name}"
    if small is not best:
        text += f"; {small.best.name} needs least memory, {small.trial.peak / 2**30:.2f} GiB a rank"
    return f"{text}. Predictions were {off:.0%} off on average."


def write(rows: Sequence[Row], title: str, commands: Sequence[str], problems: Sequence[str], run_dir: Path) -> None:
    """Write the page, its pictures and comparison.json.

    Args:
        rows: The rows, the fastest first.
        title: The model and the batch.
        commands: The command of each row.
        problems: A sentence for each strategy that failed.
        run_dir: The run directory, where the files are written.
    """
    from training.reporting.plot import embedded

    figures = {"seconds of a step": _bars(rows, title)}
    pipeline = next((row for row in rows if row.trial.steps), None)
    if pipeline is not None:
        from training.reporting.timeline import beside

        name = f"{pipeline.best.name}, predicted above measured"
        figures[name] = beside(timeline_of(pipeline.best), pipeline.trial.steps, name)
    for figure, file in zip(figures.values(), (BARS, TIMELINES), strict=False):
        figure.savefig(run_dir / file)
    page = render(
        Path(__file__).with_name("comparison.html.jinja"),
        describe(),
        title=title,
        sentence=sentence(rows),
        pictures={name: embedded(figure) for name, figure in figures.items()},
        columns=["layout", "seconds, p", "seconds, m", "off", *_PAIRS],
        rows=list(zip([cells(row) for row in rows], commands, strict=True)),
        problems=problems,
    )
    (run_dir / PAGE).write_text(page, encoding="utf-8")
    write_json(run_dir / JSON, {"rows": [_numbers(row) for row in rows], "problems": list(problems)})


def _numbers(row: Row) -> dict[str, Any]:
    predicted, measured = row.best.seconds.total, row.trial.seconds
    return {
        "layout": row.best.layout.keys(),
        "predicted": {"seconds": predicted, **row.predicted, "bytes": row.best.memory.total},
        "measured": {"seconds": measured, **row.measured, "bytes": row.trial.peak},
    }


def _bars(rows: Sequence[Row], title: str) -> Any:
    """Draw two bars for each row: the predicted bar, which is lighter, above the measured bar."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from training.reporting import plot

    colors: dict[str, str] = dict(zip(PARTS, (plot.BLUE, plot.PALE, plot.ORANGE), strict=True))
    with plot.style():
        figure = Figure(figsize=(plot.NARROW, 1.4 + 0.6 * len(rows)))
        axes = figure.add_subplot()
        for place, row in enumerate(rows):
            for shift, parts, alpha in ((-0.2, row.predicted, 0.55), (0.2, row.measured, 1.0)):
                left = 0.0
                for part, size in parts.items():
                    axes.barh(place + shift, size, 0.36, left, color=colors[part], alpha=alpha)
                    left += size
                axes.text(left, place + shift, f" {left:.3g}", va="center", fontsize="small")
        axes.set_yticks(range(len(rows)), [fill(row.best.name, _NAME) for row in rows])
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2 * max(sum(parts.values()) for row in rows for parts in (row.predicted, row.measured)))
        axes.set(xlabel="seconds of a step", title="predicted above measured")
        figure.suptitle(title, x=0.005, ha="left")  # above the names, too: it may be long
        handles = [Patch(color=color, label=part) for part, color in colors.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure
