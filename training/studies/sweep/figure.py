"""The figures of a sweep. This module imports matplotlib, so it is imported only to draw."""

from __future__ import annotations

from contextlib import suppress
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from training.reporting import plot
from training.reporting.curves import draw
from training.reporting.job_record import label
from training.studies.sweep.table import TIME, Row, Table

CHUNKS = "parallel.chunks"
_HEIGHT = 3.8  # inches
_LEGEND = 16  # maximum number of entries; beyond it colors repeat


@plot.style()
def score_figure(table: Table) -> Figure:
    """Draw the objective against the swept value with error bars (see ``_spread``), and mark the best row.

    One numeric override is the x axis, and the other overrides distinguish curves. Without a numeric override, each job
    is a bar. Over ``parallel.chunks`` of a pipeline, the ideal time is also drawn (see ``ideal_times``).
    ``table.scored`` must not be empty.
    """
    axis = numeric_axis(table)
    height = _HEIGHT if axis else max(_HEIGHT, 0.5 + 0.5 * len(table.scored))
    axes = (figure := Figure(figsize=(plot.NARROW, height))).add_subplot()
    if axis is None:
        _bars(axes, table)
    else:
        _curves(axes, table, axis)
    subjects = [{row.summary.get(key) for row in table.scored} - {None} for key in ("model", "parallel", "device")]
    axes.set_title(", ".join(str(subject.pop()) for subject in subjects if len(subject) == 1))  # what all jobs share
    _add_legend(figure, axes)
    return figure


@plot.style()
def loss_figure(table: Table) -> Figure | None:
    """Draw the losses of each row over its steps (see ``curves.draw``); None if there are none.

    Failed jobs of a setting are left out, unless all have failed.
    """
    jobs = {row.label: [job for job in row.repeats if job.finished] or row.repeats or [row] for row in table.rows}
    figure = draw({label: [job.points for job in own] for label, own in jobs.items()})
    if figure is not None:
        _add_legend(figure, figure.axes[0])
    return figure


def numeric_axis(table: Table) -> str | None:
    """Return the override to draw along x: the chunks if they are swept, otherwise the override with the most numbers.

    Seeds are never the x axis, because they only distinguish repetitions. None if there is no numeric override.
    """
    counts: dict[str, int] = {}
    for key in table.keys:
        with suppress(KeyError, ValueError):
            counts[key] = len({float(row.values[key]) for row in table.scored})
    several = [key for key, count in counts.items() if count > 1 and key != "seed"]
    return CHUNKS if CHUNKS in several else max(several, key=lambda key: counts[key], default=None)


def ideal_times(rows: list[Row]) -> list[float] | None:
    """Return the times that a pipeline's rows would have if splitting the batch into micro-batches cost nothing.

    The time is W / (1 - ideal bubble), which is W (m + p - 1) / m for GPipe and 1F1B with m chunks and p stages. W, the
    time of one stage, is the minimum of time x (1 - ideal bubble) over the rows. The curve therefore touches the row
    that comes nearest to its own ideal, and no row lies below it. None if a row has no pipeline.
    """
    bubbles = [bubble for row in rows if (bubble := row.summary.get("ideal_bubble_fraction")) is not None]
    if len(bubbles) < len(rows):
        return None
    work = min(row.score * (1 - bubble) for row, bubble in zip(rows, bubbles, strict=True))
    return [work / (1 - bubble) for bubble in bubbles]


def _curves(axes: Axes, table: Table, axis: str) -> None:
    def place(row: Row) -> float:
        return float(row.values[axis])

    others = [key for key in table.keys if key != axis]
    groups: dict[str, list[Row]] = {}
    measured = "mean ± standard deviation" if table.repeated else "measured"
    for row in sorted(table.scored, key=place):
        groups.setdefault(label(row.job, others) if others else measured, []).append(row)
    for (name, rows), color in zip(groups.items(), cycle(plot.COLORS), strict=False):
        x = [place(row) for row in rows]
        axes.errorbar(x, [row.score for row in rows], _spread(table, rows), marker="o", color=color, label=name)
        ideal = ideal_times(rows) if table.objective.name == TIME and axis == CHUNKS and len(rows) > 1 else None
        if ideal is not None:
            axes.plot(x, ideal, "--", color=color, alpha=0.6, label=f"{name}, ideal" if others else "ideal")
    for row in table.best:
        name = f"best: {row.label}, {table.show_score(row)}"
        axes.plot(place(row), row.score, "*", color=plot.GREEN, ms=17, mec="white", zorder=4, label=name)
    axes.set(xlabel=axis, ylabel=table.objective.title)
    if table.objective.name == TIME:
        axes.set_ylim(bottom=0)
    ticks = sorted({place(row) for row in table.scored})
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= 8:
        axes.set_xscale("log")
    if len(ticks) <= 12:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.minorticks_off()


def _bars(axes: Axes, table: Table) -> None:
    rows = table.scored[::-1]
    colors = [plot.GREEN if row in table.best else plot.BLUE for row in rows]
    bars = axes.barh(range(len(rows)), [row.score for row in rows], xerr=_spread(table, rows), color=colors)
    axes.set_yticks(range(len(rows)), [row.label.replace(" ", "\n") for row in rows])
    axes.bar_label(bars, [table.show_score(row) + " (best)" * (row in table.best) for row in rows], padding=5)
    axes.set_xlabel(table.objective.title)
    axes.margins(x=0.7 if table.repeated else 0.35)
    axes.grid(visible=False, axis="y")


def _spread(table: Table, rows: list[Row]) -> np.ndarray | None:
    """Return the length of error bars: the standard deviations of settings, [rows], 0 for a single job.

    Of jobs, return the distances from the median time to the 10th and the 90th percentile, [2, rows], and None if the
    objective is not the time.
    """
    if table.repeated:
        return np.nan_to_num([row.deviation for row in rows])
    times = [row.times for row in rows if row.times is not None]
    return np.diff(times).T if table.objective.name == TIME and len(times) == len(rows) else None


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Add a legend below the axes, where it covers no curve."""
    labels = axes.get_legend_handles_labels()[1]
    if 0 < len(labels) <= _LEGEND:
        figure.legend(loc="outside lower center", ncols=2 if max(map(len, labels)) < 36 else 1)
