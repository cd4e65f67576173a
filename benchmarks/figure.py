"""The benchmarks' figures, drawn from the rows of their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.timing import Spread
from training.reporting.plot import BLUE, COLORS, GRAY, style


@contextmanager
def drawing(path: Path, width: float, height: float = 4.2, mosaic: Sequence = "a") -> Iterator[list[Axes]]:
    """Yield axes in the style of all figures, and write them to ``path`` as a PNG.

    Args:
        path: Of the PNG.
        width: In inches, of all of them.
        height: Likewise.
        mosaic: Which axes stand where, as in matplotlib's ``subplot_mosaic``.
    """
    with style():
        figure = Figure(figsize=(width, height))
        yield list(figure.subplot_mosaic(mosaic).values())
    figure.savefig(path)


def bars(path: Path, rows: Sequence[Mapping], ours: Sequence[str], width: float) -> None:
    """Draw the median of each row as a bar, with whiskers from fastest to slowest.

    Args:
        path: Of the PNG.
        rows: Of a table.
        ours: The runs that are coloured.
        width: In inches.
    """
    names, spreads = [row["run"] for row in rows], [Spread.read(row) for row in rows]
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.fastest for spread in spreads]
    above = [spread.slowest - spread.median for spread in spreads]
    colours = [BLUE if name in ours else GRAY for name in names]
    with drawing(path, width=width) as (axes,):
        drawn = axes.bar(range(len(rows)), medians, yerr=[below, above], color=colours, width=0.62)
        axes.tick_params(axis="x", labelsize="small")
        axes.bar_label(drawn, [f"{value:.3g}" for value in medians], padding=3)
        axes.set_xticks(range(len(rows)), names, rotation=35, ha="right")
        axes.set_ylabel("seconds a step")
        axes.grid(visible=False, axis="x")


def against_measured(path: Path, rows: Sequence[Mapping], points: Sequence[tuple[str, float, float]]) -> None:
    """Draw predicted against measured seconds of a step, on logarithmic axes.

    Args:
        path: Of the PNG.
        rows: Of the table, which are not drawn.
        points: Of each layout: what its colour stands for, measured and predicted seconds.
    """
    with drawing(path, width=6.0, height=6.0) as (axes,):
        for name, colour in zip(dict.fromkeys(name for name, *_ in points), COLORS, strict=False):
            own = [(t, s) for one, t, s in points if one == name]
            axes.plot(*zip(*own, strict=True), "o", color=colour, ms=4, alpha=0.7, label=name)
        ends = [min(min(t, s) for _, t, s in points) * 0.8, max(max(t, s) for _, t, s in points) * 1.25]
        axes.plot(ends, ends, color="black", linewidth=1)
        axes.set(
            xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured s a step", ylabel="predicted s a step"
        )
        axes.legend()
