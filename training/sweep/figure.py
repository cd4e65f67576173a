"""A sweep's figures. This module imports matplotlib, so it is imported only to draw."""

from __future__ import annotations

from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from training.reporting.job_record import label
from training.sweep.table import Row, Table

CHUNKS = "parallel.chunks"
_WIDTH, _HEIGHT = 6.0, 4.2  # inches: legible on a phone
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f3c8d", "#666666")
_BEST, _IDEAL, _FAILED = "#009e73", "#777777", "#c0392b"
_LEGEND = 16  # entries at most: beyond them colours repeat
_POINTS = 400  # of a loss curve, however long the run


def score_figure(table: Table) -> Figure:
    """Draw the objective against the swept value with the best job marked; of times, the spread of the steps too.

    One numeric override is the x axis and the others distinguish curves; without a numeric one each job is a bar. Over
    ``parallel.chunks`` of a pipeline the ideal time is drawn too, see ``ideal_costs``. ``table.scores`` must not be
    empty.
    """
    axis = numeric_axis(table)
    height = _HEIGHT if axis else max(_HEIGHT, 0.5 + len(table.rows) * (0.1 + 0.22 * len(table.keys)))
    figure, axes = _canvas(height)
    scale, title = 1.0, table.objective.title
    if table.by_time:
        scale, unit = (1e3, "ms") if max(table.scores.values()) < 1 else (1.0, "s")
        title = f"time per {'sample' if table.per_sample else 'step'} ({unit})"
    if axis is None:
        _bars(axes, table, scale)
        axes.set_xlabel(title)
    else:
        _curves(axes, table, axis, scale)
        axes.set(xlabel=axis, ylabel=title)
    subject = ("/".join(dict.fromkeys(_texts(table, key))) for key in ("model", "parallel", "device"))
    axes.set_title(", ".join(filter(None, subject)), loc="left", fontsize="medium")
    _add_legend(figure, axes)
    return figure


def loss_figure(table: Table) -> Figure | None:
    """Draw the training loss of each job over its steps; None if no job has any."""
    rows = [row for row in table.rows if len(row.curve) > 1]
    if not rows:
        return None
    figure, axes = _canvas(0.75 * _HEIGHT)
    for row, colour, style in zip(rows, cycle(_COLOURS), cycle(("-", "--", ":")), strict=False):
        axes.plot(*zip(*row.curve[:: max(1, len(row.curve) // _POINTS)], strict=True), style, c=colour, label=row.label)
    # One that diverges would flatten all others.
    axes.set_ylim(top=min(axes.get_ylim()[1], 2 * max(abs(row.curve[0][1]) for row in rows) or 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="step", ylabel="training loss")
    _add_legend(figure, axes)
    return figure


def numeric_axis(table: Table) -> str | None:
    """Return the override to draw along x: the chunks if they are swept, else the one with most numbers.

    Seeds only tell repetitions apart and are no axis. None if there is no numeric override.
    """
    counts = {}
    for key in table.keys:
        numbers = {_number(row, key) for row in table.scores}
        if key != "seed" and None not in numbers and len(numbers) > 1:
            counts[key] = len(numbers)
    return CHUNKS if CHUNKS in counts else max(counts, key=counts.get, default=None)


def ideal_costs(table: Table, rows: list[Row]) -> list[float] | None:
    """Return the costs of a pipeline's rows if splitting the batch into micro-batches cost nothing.

    That is W / (1 - ideal bubble), or W (m + p - 1) / m for GPipe and 1F1B with m chunks and p stages. W, the time of
    one stage, is the smallest cost x (1 - ideal bubble): the curve touches the row that comes nearest to its own ideal,
    and no row lies below it. None if a row has no pipeline.
    """
    bubbles = [row.summary.get("ideal_bubble_fraction") for row in rows]
    if None in bubbles:
        return None
    work = min(table.scores[row] * (1 - bubble) for row, bubble in zip(rows, bubbles, strict=True))
    return [work / (1 - bubble) for bubble in bubbles]


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _curves(axes: Axes, table: Table, axis: str, scale: float) -> None:
    others = [key for key in table.keys if key != axis]
    groups: dict[str, list[Row]] = {}
    for row in sorted(table.scores, key=lambda row: _number(row, axis)):
        groups.setdefault(label(row.job, others) if others else "measured", []).append(row)
    for (name, rows), colour in zip(groups.items(), cycle(_COLOURS), strict=False):
        x, y = [_number(row, axis) for row in rows], [table.scores[row] * scale for row in rows]
        axes.errorbar(x, y, _whiskers(table, rows, scale), marker="o", color=colour, capsize=3, label=name, zorder=3)
        if table.by_time and axis == CHUNKS and len(rows) > 1:
            if (ideal := ideal_costs(table, rows)) is not None:
                name = "ideal" if colour == _COLOURS[0] else None
                colour = _IDEAL if len(groups) == 1 else colour
                axes.plot(x, np.multiply(ideal, scale), "--", color=colour, linewidth=1.3, label=name, zorder=2)
    for row in table.best:
        name = f"{_best(table)}: {row.label}, {table.show_score(row)}"
        star = {"marker": "*", "color": _BEST, "markersize": 17, "markeredgecolor": "white", "zorder": 4}
        axes.plot(_number(row, axis), table.scores[row] * scale, linestyle="none", label=name, **star)
    lost = {_number(row, axis) for row in table.rows if not row.finished} - {None}
    if lost:
        bottom = {"transform": axes.get_xaxis_transform(), "label": "not finished"}
        axes.plot(sorted(lost), [0.02] * len(lost), "x", color=_FAILED, **bottom)
    ticks = sorted({_number(row, axis) for row in table.scores} | lost)
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= 8:
        axes.set_xscale("log")
    if len(ticks) <= 12 and all(len(f"{tick:g}") <= 5 for tick in ticks):
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.xaxis.minorticks_off()
    scores = table.scores.values()
    if min(scores) > 0 and max(scores) / min(scores) > 20:
        axes.set_yscale("log")
    elif table.by_time:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=_IDEAL, alpha=0.25, zorder=0)


def _bars(axes: Axes, table: Table, scale: float) -> None:
    rows = table.rows[::-1]
    for place, row in enumerate(rows):
        if row not in table.scores:
            axes.text(0, place, f" {row.job.status}", color=_FAILED, va="center")
            continue
        best = row in table.best
        style = {"color": _BEST if best else _COLOURS[0], "alpha": 0.85, "height": 0.65, "capsize": 3}
        bar = axes.barh(place, table.scores[row] * scale, xerr=_whiskers(table, [row], scale), **style)
        axes.bar_label(bar, [table.show_score(row) + f" ({_best(table)})" * best], padding=5)
    axes.set_yticks(range(len(rows)), [row.label.replace(" ", "\n") for row in rows])
    longest = max(table.costs(row)[2] if table.by_time else score for row, score in table.scores.items())
    axes.set_xlim(0, 1.35 * scale * longest) if longest > 0 else axes.margins(x=0.35)
    axes.set_ylim(-0.6, len(rows) - 0.4)


def _best(table: Table) -> str:
    return "best median" if table.by_time else "best"


def _whiskers(table: Table, rows: list[Row], scale: float) -> np.ndarray | None:
    """Distances from the median down to the 10th and up to the 90th percentile, [2, rows]; None unless by time."""
    if not table.by_time:
        return None
    return np.diff([table.costs(row) for row in rows]).T * scale


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Add a legend above the axes, where it covers nothing."""
    entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: not isinstance(entry[0], ErrorbarContainer))  # measurements come first
    if 0 < len(entries) <= _LEGEND:
        handles, labels = zip(*entries, strict=True)
        columns = 2 if max(map(len, labels)) < 40 else 1
        figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize="small", ncols=columns)


def _texts(table: Table, key: str) -> list[str]:
    return [str(row.summary[key]) for row in table.rows if key in row.summary]


def _number(row: Row, key: str) -> float | None:
    try:
        return float(row.values[key])
    except (KeyError, ValueError):
        return None
