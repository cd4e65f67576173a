"""Learning curves of a run and of the jobs of a sweep. It imports matplotlib, so it is imported only to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from training.reporting import plot
from training.reporting.metrics import METRICS, Points, points_of, read_records

PICTURE = "curves.png"
_HEIGHT = 2.9  # inches of a panel
_MARKERS = 0.1  # distance between the markers of a curve, as a fraction of the figure's diagonal
_POINTS = 400  # points of a curve, however long the run


def write_curves(run_dir: Path) -> None:
    """Draw all numbers in the metrics.jsonl of a run into curves.png; log a warning if it cannot be written."""
    if (figure := draw({"": [points_of(read_records(run_dir / METRICS))]}, columns=2)) is not None:
        plot.save(figure, run_dir / PICTURE)


@plot.style()
def draw(runs: Mapping[str, Sequence[Points]], columns: int = 1) -> Figure | None:
    """Draw a panel for each number, over the steps; None if no number has two points.

    Of a single run, a number of the validation is a dashed curve in the panel of the same number of the training.

    Args:
        runs: By label, one run; or several runs, whose mean is drawn in a band of one sample standard deviation.
        columns: The number of panels side by side.
    """
    alone, every = len(runs) == 1, [pair for run in runs.values() for points in run for pair in points.items()]
    drawn = {key for key, own in every if len(own) + (alone and key[:4] == "val_") > 1}
    panels: dict[str, list[str]] = {}
    for key in sorted(drawn, key=lambda key: (key not in ("loss", "val_loss"), key.removeprefix("val_"), key)):
        panels.setdefault(key.removeprefix("val_") if alone else key, []).append(key)
    if not panels:
        return None
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(plot.NARROW if columns == 1 else plot.MEDIUM, rows * _HEIGHT))
    for number, (name, keys) in enumerate(panels.items(), 1):
        axes, starts, bands = figure.add_subplot(rows, columns, number), [], []
        for place, ((label, run), color) in enumerate(zip(runs.items(), cycle(plot.COLORS), strict=False)):
            for key in keys:
                tables = [dict(points[key]) for points in run if key in points]
                steps = sorted(set.intersection(*map(set, tables))) if tables else []
                steps = steps[:: max(1, len(steps) // _POINTS)]
                if not steps:
                    continue
                values = np.array([[table[step] for step in steps] for table in tables])
                # Equal curves coincide. Their markers take turns, so that all of them are visible.
                marks = {"marker": "o", "ms": 4, "markevery": (_MARKERS * place / len(runs), _MARKERS)}
                look: dict[str, Any] = {"lw": 1} if alone else marks
                if name != key:
                    look, color = {"ls": "--", "marker": "."}, plot.COLORS[1]
                axes.plot(steps, mean := values.mean(0), c=color, label=label * (number == 1), **look)
                starts.append(abs(mean[0]))
                spread = values.std(0, ddof=1) if len(tables) > 1 else mean * 0
                bands.append((mean, mean - spread))
                if len(tables) > 1:
                    axes.fill_between(steps, mean - spread, mean + spread, color=color, alpha=0.2, lw=0)
        if name in ("loss", "val_loss") and starts:  # a diverging curve would flatten all other curves
            bottom, top = axes.get_ylim()
            top = min(top, 2 * max(starts) or 1)
            lowest = min(low[mean <= top].min(initial=top) for mean, low in bands)
            axes.set_ylim(max(bottom, lowest - 0.05 * (top - lowest)), top)
        low, high = axes.dataLim.intervaly
        if name == "grad_norm" and high > 50 * low > 0:
            axes.set_yscale("log")
        axes.locator_params("x", integer=True)
        axes.set(xlabel="step", title=name.replace("val_", "validation ") + " (dashed: validation)" * (keys != [name]))
    return figure
