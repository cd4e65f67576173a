"""A sweep's figures. This module imports matplotlib, so it is imported only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import cycle

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from training.reporting.job_record import label
from training.sweep.table import Row, Table

CHUNKS = "parallel.chunks"
WIDE, NARROW = 8.0, 4.2  # inches: for a desktop and for a phone
_HEIGHT = 4.6
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f3c8d", "#666666")
_BEST, _IDEAL, _FAILED = "#009e73", "#777777", "#c0392b"
_LEGEND = 16  # entries at most: beyond them colours repeat
_POINTS = 400  # of a loss curve, however long the run
_SAME = 1e-3  # of a curve's height: what an eye does not see
_DIVERGED = 2  # times the largest first loss: what is above is cut off, as it would flatten all other curves
_LIGHT_INK = "#d7dde3"
_DARK = {
    key: _LIGHT_INK
    for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color")
}


def colours(dark: bool) -> AbstractContextManager[None]:
    """Draws for a dark page, or for a light one, inside the block. The background is left to the page."""
    return matplotlib.rc_context({**(_DARK if dark else {}), "savefig.transparent": True})


def score_figure(table: Table, width: float = WIDE) -> Figure:
    """Draws the objective against the swept value with the best job marked; of times, the spread of the steps too.

    One numeric override is the x axis and the others distinguish curves; without a numeric one each job is a bar. Over
    ``parallel.chunks`` of a pipeline the ideal time is drawn too, see ``ideal_costs``.

    Args:
        table: The sweep; ``table.scored`` must not be empty.
        width: In inches.
    """
    axis = numeric_axis(table)
    height = _HEIGHT if axis else max(_HEIGHT, 0.5 + len(table.rows) * (0.1 + 0.22 * len(table.keys)))
    figure, axes = _canvas(width, height)
    scale, title = 1.0, table.objective.title
    if table.by_time:
        scale, unit = (1e3, "ms") if max(row.score for row in table.scored) < 1 else (1.0, "s")
        title = f"time per {'sample' if table.per_sample else 'step'} ({unit})"
    if axis is None:
        _bars(axes, table, scale)
        axes.set_xlabel(title)
    else:
        _curves(axes, table, axis, scale)
        axes.set_ylabel(title)
    axes.set_title(table.subject, loc="left", fontsize="medium")
    _add_legend(figure, axes)
    return figure


def loss_figure(table: Table, width: float = WIDE) -> Figure | None:
    """Draws the training loss of each job over its steps, ``width`` inches wide; returns None if no job has any.

    Of curves that lie on each other the earlier are drawn wider, so that all of them show.
    """
    rows = _with_curves(table)
    if not rows:
        return None
    figure, axes = _canvas(width, 0.75 * _HEIGHT)
    wider = {row.label: len(group) - place for group in coinciding(table) for place, row in enumerate(group, 1)}
    for row, colour, style in zip(rows, cycle(_COLOURS), cycle(("-", "--", ":")), strict=False):
        steps, losses = zip(*row.curve[:: max(1, len(row.curve) // _POINTS)], strict=True)
        over = wider.get(row.label, 0)
        width_pt = 1.5 + 2 * min(over, 5)
        axes.plot(steps, losses, "-" if over else style, color=colour, label=row.label, linewidth=width_pt)
    if (highest := cut_off(table)) is not None:
        lowest = min(loss for row in rows for _, loss in row.curve)
        axes.set_ylim(lowest - 0.05 * (highest - lowest), highest)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    _add_legend(figure, axes)
    return figure


def cut_off(table: Table) -> float | None:
    """Returns the loss above which the curves are not drawn, as one of them diverges; None where none does."""
    rows = _with_curves(table)
    highest = _DIVERGED * max((row.curve[0][1] for row in rows), default=0.0)
    return highest if 0 < highest < max((loss for row in rows for _, loss in row.curve), default=0.0) else None


def coinciding(table: Table) -> list[list[Row]]:
    """Returns the groups of jobs whose loss curves lie on each other: an eye sees one curve."""
    groups: list[list[Row]] = []
    for row in _with_curves(table):
        losses = [loss for _, loss in row.curve]
        alike = _SAME * (max(losses) - min(losses))
        group = next((group for group in groups if difference([group[0], row]) <= alike), None)
        if group is None:
            groups.append([row])
        else:
            group.append(row)
    return [group for group in groups if len(group) > 1]


def difference(rows: Sequence[Row]) -> float:
    """Returns the largest difference between the loss curves of ``rows`` at any step; infinite for other steps."""
    curves = [np.array(row.curve) for row in rows]
    if any(len(curve) != len(curves[0]) or (curve[:, 0] != curves[0][:, 0]).any() for curve in curves):
        return float("inf")
    losses = np.stack([curve[:, 1] for curve in curves])
    return float((losses.max(axis=0) - losses.min(axis=0)).max())


def _with_curves(table: Table) -> list[Row]:
    return [row for row in table.rows if len(row.curve) > 1]


def numeric_axis(table: Table) -> str | None:
    """Returns the override to draw along x: the chunks if they are swept, else the one with most numbers.

    Seeds only tell repetitions apart and are no axis. None if there is no numeric override.
    """
    counts = {}
    for key in table.keys:
        numbers = [_number(row, key) for row in table.scored]
        if key != "seed" and None not in numbers and len(set(numbers)) > 1:
            counts[key] = len(set(numbers))
    return CHUNKS if CHUNKS in counts else max(counts, key=counts.get, default=None)


def ideal_costs(rows: list[Row], chunks: np.ndarray) -> np.ndarray | None:
    """Returns the costs that a pipeline would have if splitting the batch into micro-batches cost nothing.

    That is W / (1 - ideal bubble), or W (m + p - 1) / m for GPipe and 1F1B with m chunks and p stages. W, the time of
    one stage, is the smallest cost x (1 - ideal bubble) of the rows: the curve touches the row that comes nearest to
    its own ideal, and no row lies below it.

    Args:
        rows: The jobs of one pipeline, which differ in their chunks.
        chunks: The numbers of chunks to return costs for, of any shape.

    Returns:
        Costs of the shape of ``chunks``; None if a row has no pipeline.
    """
    bubbles = [row.summary.get("ideal_bubble_fraction") for row in rows]
    if None in bubbles:
        return None
    work = min(row.cost * (1 - bubble) for row, bubble in zip(rows, bubbles, strict=True))
    counts = [_number(row, CHUNKS) for row in rows]
    # p - 1 for GPipe and 1F1B at any number of chunks; for other schedules interpolated between the measured numbers.
    fill = [bubble / (1 - bubble) * count for bubble, count in zip(bubbles, counts, strict=True)]
    return work * (1 + np.interp(chunks, counts, fill) / chunks)


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _curves(axes: Axes, table: Table, axis: str, scale: float) -> None:
    others = [key for key in table.keys if key != axis]
    groups: dict[str, list[Row]] = {}
    for row in sorted(table.scored, key=lambda row: _number(row, axis)):
        groups.setdefault(label(row.job, others) if others else "measured", []).append(row)
    for (name, rows), colour in zip(groups.items(), cycle(_COLOURS), strict=False):
        x, y = [_number(row, axis) for row in rows], [row.score * scale for row in rows]
        whiskers = _whiskers(rows, scale) if table.by_time else None
        axes.errorbar(x, y, whiskers, marker="o", color=colour, capsize=3, label=name, zorder=3)
        has_ideal = table.by_time and axis == CHUNKS and len(rows) > 1
        dense = np.geomspace(x[0], x[-1], 200) if has_ideal else None
        ideal = None if dense is None else ideal_costs(rows, dense)
        if ideal is not None:
            name = "ideal" if colour == _COLOURS[0] else None
            colour = _IDEAL if len(groups) == 1 else colour
            axes.plot(dense, ideal * scale, "--", color=colour, linewidth=1.3, label=name, zorder=2)
    for row in table.scored:
        if row.best:
            name = f"{_best(table)}: {row.label}, {table.show_score(row)}"
            star = {"marker": "*", "color": _BEST, "markersize": 17, "markeredgecolor": "white", "zorder": 4}
            axes.plot(_number(row, axis), row.score * scale, linestyle="none", label=name, **star)
    lost = {_number(row, axis) for row in table.rows if not row.finished} - {None}
    if lost:
        bottom = {"transform": axes.get_xaxis_transform(), "label": "not finished"}
        axes.plot(sorted(lost), [0.02] * len(lost), "x", color=_FAILED, **bottom)
    ticks = sorted({_number(row, axis) for row in table.scored} | lost)
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= 8:
        axes.set_xscale("log")
    axes.set_xticks(ticks, _tick_labels(axes, ticks))
    axes.xaxis.minorticks_off()
    scores = [row.score for row in table.scored]
    if min(scores) > 0 and max(scores) / min(scores) > 20:
        axes.set_yscale("log")
    elif table.by_time:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(axis)
    axes.grid(axis="y", color=_IDEAL, alpha=0.25, zorder=0)


def _tick_labels(axes: Axes, ticks: Sequence[float]) -> list[str]:
    """The numbers at the ticks, without those that would run into the one before."""
    places = np.log(ticks) if axes.get_xscale() == "log" else np.array(ticks)
    places = places / max(places[-1] - places[0], 1e-300)
    character = 0.0115 * WIDE / axes.figure.get_figwidth()  # the width of one, as a fraction of the axis
    labels, last = [], None
    for place, tick in zip(places, ticks, strict=True):
        text = f"{tick:g}"
        fits = last is None or place - last[0] >= character * (len(text) + len(last[1])) / 2
        labels.append(text if fits else "")
        last = (place, text) if fits else last
    return labels


def _bars(axes: Axes, table: Table, scale: float) -> None:
    rows = table.rows[::-1]
    for place, row in enumerate(rows):
        if row.score is None:
            axes.text(0, place, f" {row.job.status}", color=_FAILED, va="center")
            continue
        colour = _BEST if row.best else _COLOURS[0]
        whiskers = _whiskers([row], scale) if table.by_time else None
        ink = {"ecolor": matplotlib.rcParams["text.color"], "capsize": 3}
        bar = axes.barh(place, row.score * scale, xerr=whiskers, color=colour, alpha=0.85, height=0.65, **ink)
        axes.bar_label(bar, [table.show_score(row) + f" ({_best(table)})" * row.best], padding=5)
    axes.set_yticks(range(len(rows)), [row.label.replace(" ", "\n") for row in rows])
    longest = max(row.spread[1] / row.divisor if table.by_time else row.score for row in table.scored)
    axes.set_xlim(0, 1.35 * scale * longest) if longest > 0 else axes.margins(x=0.35)
    axes.set_ylim(-0.6, len(rows) - 0.4)


def _best(table: Table) -> str:
    return "best median" if table.by_time else "best"


def _whiskers(rows: list[Row], scale: float) -> np.ndarray:
    """Distances from the median down to the 10th and up to the 90th percentile, [2, rows]."""
    lengths = [(row.step_time - row.spread[0], row.spread[1] - row.step_time) for row in rows]
    return np.maximum(lengths, 0).T * scale / [row.divisor for row in rows]


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Adds a legend above the axes, where it covers nothing."""
    entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: not isinstance(entry[0], ErrorbarContainer))  # measurements come first
    if 0 < len(entries) <= _LEGEND:
        handles, labels = zip(*entries, strict=True)
        columns = 3 if figure.get_figwidth() > 6 and max(map(len, labels)) < 40 else 1
        figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize="small", ncols=columns)


def _number(row: Row, key: str) -> float | None:
    try:
        return float(row.values[key])
    except (KeyError, ValueError):
        return None
