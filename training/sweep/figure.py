"""A sweep's figures. Imports matplotlib, so import this only when there is something to draw."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from training.reporting.job_record import label
from training.sweep.table import Row, Table

WIDE, NARROW = (8.0, 4.6), (4.2, 4.6)  # inches
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f3c8d", "#666666")
BEST, IDEAL, FAILED = "#009e73", "#777777", "#c0392b"
_AXES_FIRST = "parallel.chunks"
_NO_AXIS = ("seed",)  # a number that only names a repetition
_LEGEND = 16  # entries at most; beyond them colours tell nothing any more
_POINTS = 400  # of a loss curve, however long the run


@dataclass
class Unit:
    """How the cost of a row is shown."""

    name: str
    factor: float
    suffix: str

    @classmethod
    def of(cls, table: Table) -> Unit:
        small = max(table.cost(row) for row in table.timed) < 0.2
        what = "time per sample" if table.per_sample else "time per step"
        return cls(f"{what} ({'ms' if small else 's'})", 1e3 if small else 1.0, "ms" if small else "s")

    def show(self, cost: float) -> str:
        return f"{cost * self.factor:.3g} {self.suffix}"


def time_figure(table: Table, size: tuple[float, float] = WIDE) -> Figure:
    """Time per step against the swept value, with the 10th to 90th percentile of the steps; the best is marked.

    One numeric axis is drawn along x, the other swept values as curves of their own; without a numeric one each job
    is a bar. Over ``parallel.chunks`` of a pipeline the ideal curve is drawn too, see ``ideal_costs``. ``table.timed``
    must not be empty.
    """
    unit = Unit.of(table)
    axis = numeric_axis(table)
    if axis is None:
        size = size[0], max(size[1], 0.5 + len(table.rows) * (0.1 + 0.22 * len(table.keys)))
    figure = Figure(figsize=size, layout="constrained", dpi=150)
    axes = figure.add_subplot()
    if axis is None:
        _bars(axes, table, unit)
    else:
        _curves(axes, table, axis, unit)
    axes.set_title(table.subject, loc="left", fontsize="medium")
    _finish(figure, axes)
    return figure


def loss_figure(table: Table, size: tuple[float, float] = WIDE) -> Figure | None:
    """The loss of each job over its steps; None where no job has any."""
    rows = [row for row in table.rows if len(row.curve) > 1]
    if not rows:
        return None
    figure = Figure(figsize=(size[0], 0.75 * size[1]), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    for row, colour, style in zip(rows, cycle(COLOURS), cycle(("-", "--", ":")), strict=False):
        steps, losses = zip(*row.curve[:: max(1, len(row.curve) // _POINTS)], strict=True)
        axes.plot(steps, losses, style, color=colour, label=row.label, linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    _finish(figure, axes)
    return figure


def numeric_axis(table: Table) -> str | None:
    """The swept key to draw along x: the chunks where they are swept, else the one with most numbers."""
    counts = {}
    for key in table.keys:
        numbers = [_number(row.values.get(key)) for row in table.timed]
        if key not in _NO_AXIS and None not in numbers and len(set(numbers)) > 1:
            counts[key] = len(set(numbers))
    return _AXES_FIRST if _AXES_FIRST in counts else max(counts, key=counts.get, default=None)


def ideal_costs(table: Table, rows: list[Row], chunks: np.ndarray) -> np.ndarray | None:
    """What a step of the pipeline of ``rows`` would cost at each number of ``chunks`` if cutting cost nothing.

    W / (1 - ideal bubble), which is W (m + p - 1) / m for GPipe and 1F1B. W, the work of a stage, is the smallest
    cost x (1 - ideal bubble) of the rows: so the curve touches the row that comes nearest to its own ideal, and no row
    lies below it. None for rows without pipeline.
    """
    bubbles = [row.summary.get("ideal_bubble_fraction") for row in rows]
    if None in bubbles:
        return None
    work = min(table.cost(row) * (1 - bubble) for row, bubble in zip(rows, bubbles, strict=True))
    counts = [_number(row.values[_AXES_FIRST]) for row in rows]
    # (p - 1) for GPipe and 1F1B, whatever the chunks: between the measured counts it is interpolated.
    fill = [bubble / (1 - bubble) * count for bubble, count in zip(bubbles, counts, strict=True)]
    return work * (1 + np.interp(chunks, counts, fill) / chunks)


def _curves(axes: Axes, table: Table, axis: str, unit: Unit) -> None:
    others = [key for key in table.keys if key != axis]
    groups: dict[str, list[Row]] = {}
    for row in sorted(table.timed, key=lambda row: _number(row.values[axis])):
        groups.setdefault(label(row.job, others) if others else "measured", []).append(row)
    for (name, rows), colour in zip(groups.items(), cycle(COLOURS), strict=False):
        x = np.array([_number(row.values[axis]) for row in rows])
        y = np.array([table.cost(row) for row in rows]) * unit.factor
        axes.errorbar(x, y, _whiskers(table, rows, unit), marker="o", color=colour, capsize=3, label=name, zorder=3)
        if axis == _AXES_FIRST and len(rows) > 1:
            dense = np.geomspace(x[0], x[-1], 200)
            ideal = ideal_costs(table, rows, dense)
            if ideal is not None:
                mine = IDEAL if len(groups) == 1 else colour
                name = "ideal" if colour == COLOURS[0] else None
                axes.plot(dense, ideal * unit.factor, "--", color=mine, linewidth=1.3, label=name, zorder=2)
    _mark_best(axes, table, axis, unit)
    _mark_failed(axes, table, axis)
    _scale_x(axes, sorted({_number(row.values[axis]) for row in table.rows if _number(row.values.get(axis))}))
    _scale_y(axes, [table.cost(row) * unit.factor for row in table.timed])
    axes.set_xlabel(axis)
    axes.set_ylabel(unit.name)
    axes.grid(axis="y", color="#e5e5e5", zorder=0)


def _bars(axes: Axes, table: Table, unit: Unit) -> None:
    rows = table.rows[::-1]
    places = np.arange(len(rows))
    costs = [table.cost(row) * unit.factor if row.step_time is not None else 0.0 for row in rows]
    tips = [0.0] * len(rows)
    for place, row in zip(places, rows, strict=True):
        if row.step_time is None:
            axes.text(0, place, f" {row.job.status}", color=FAILED, va="center")
            continue
        axes.barh(place, costs[place], color=BEST if row.best else COLOURS[0], alpha=0.85, height=0.65)
        whiskers = _whiskers(table, [row], unit)
        axes.errorbar([costs[place]], [place], xerr=whiskers, color="#333333", capsize=3)
        tips[place] = costs[place] + float(whiskers[1][0])
    for place, row in zip(places, rows, strict=True):
        if row.step_time is not None:
            shown = unit.show(table.cost(row)) + (" (best)" if row.best else "")
            axes.annotate(shown, (tips[place], place), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [row.label.replace(" ", "\n") for row in rows])
    axes.set_xlim(0, 1.35 * max(tips))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(unit.name)


def _whiskers(table: Table, rows: list[Row], unit: Unit) -> np.ndarray:
    """Distances from the median down to the 10th and up to the 90th percentile, [2, rows]."""
    scale = np.array([table.cost(row) / row.step_time for row in rows]) * unit.factor
    low, high = np.array([row.spread for row in rows]).T
    middle = np.array([row.step_time for row in rows])
    return np.maximum(np.array([middle - low, high - middle]), 0) * scale


def _mark_best(axes: Axes, table: Table, axis: str, unit: Unit) -> None:
    for row in table.timed:
        if row.best:
            point = _number(row.values[axis]), table.cost(row) * unit.factor
            name = f"best: {row.label}, {unit.show(table.cost(row))}"
            axes.plot(*point, "*", color=BEST, markersize=17, markeredgecolor="white", zorder=4, label=name, ls="none")


def _mark_failed(axes: Axes, table: Table, axis: str) -> None:
    lost = [_number(row.values.get(axis)) for row in table.rows if not row.finished]
    lost = sorted({value for value in lost if value is not None})
    if lost:
        where = axes.get_xaxis_transform()
        axes.plot(lost, [0.02] * len(lost), "x", color=FAILED, transform=where, label="not finished")


def _scale_x(axes: Axes, ticks: list[float]) -> None:
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= 8:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _scale_y(axes: Axes, costs: list[float]) -> None:
    if max(costs) / min(costs) > 20:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)


def _finish(figure: Figure, axes: Axes) -> None:
    """No frame, and a legend above the axes, where it covers nothing."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: not isinstance(entry[0], ErrorbarContainer))  # what was measured comes first
    if 0 < len(entries) <= _LEGEND:
        handles, labels = zip(*entries, strict=True)
        columns = 3 if figure.get_figwidth() > 6 and max(map(len, labels)) < 40 else 1
        figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize="small", ncols=columns)


def _number(text: str | None) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
