"""The benchmarks' figures, drawn from the rows of their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.timing import Spread

BLUE, GREY = "#0072b2", "#8a8a8a"
_MANY = 7  # more names than this do not fit beside each other


def canvas(columns: int = 1, rows: int = 1, width: float = 6.0) -> tuple[Figure, list[Axes]]:
    """Returns a figure of columns x rows axes without frames, each ``width`` inches wide."""
    figure = Figure(figsize=(width * columns, 4.2 * rows), layout="constrained", dpi=150)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def bars(axes: Axes, spreads: Mapping[str, Spread], unit: str, ours: Sequence[str] = ()) -> None:
    """Draws the median of each spread as a bar, with whiskers from fastest to slowest; ``ours`` are coloured."""
    medians = [spread.median for spread in spreads.values()]
    below = [spread.median - spread.fastest for spread in spreads.values()]
    above = [spread.slowest - spread.median for spread in spreads.values()]
    colours = [BLUE if name in ours else GREY for name in spreads]
    drawn = axes.bar(range(len(spreads)), medians, yerr=[below, above], color=colours, width=0.62, capsize=4)
    axes.tick_params(axis="x", labelsize="small")
    axes.bar_label(drawn, [f"{value:.3g}" for value in medians], padding=3)
    if len(spreads) > _MANY:
        axes.set_xticks(range(len(spreads)), spreads, rotation=35, ha="right")
    else:
        axes.set_xticks(range(len(spreads)), [name.replace(", ", ",\n").replace(" (", "\n(") for name in spreads])
    axes.set_ylabel(unit)


def save_bars(path: Path, rows: Sequence[Mapping], ours: Sequence[str], width: float) -> None:
    """Writes a PNG of one bar per row to ``path``; ``width`` is in inches."""
    figure, (axes,) = canvas(width=width)
    bars(axes, {row["run"]: Spread.read(row) for row in rows}, "seconds a step", ours)
    figure.savefig(path)
    print(f"figure: {path}")


def pipelining(path: Path, rows: Sequence[Mapping], swept: Sequence[Mapping]) -> Path:
    """Writes a PNG with the bars of each model and, beside them, its sweep over chunks; returns ``path``."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = canvas(columns=2, rows=len(models))
    for model, left, right in zip(models, axes[::2], axes[1::2], strict=True):
        spreads = {row["run"]: Spread.read(row) for row in rows if row["model"] == model}
        bars(left, spreads, "seconds a step", ours=[n for n in spreads if n.startswith(("naive", "pipelined"))])
        left.set_title(model)
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in swept:
            if row["model"] == model:
                curve = curves.setdefault(f"{row['run']} {row['schedule']}".strip(), [])
                curve.append((float(row["chunks"]), float(row["seconds a step"])))
        for name, curve in curves.items():
            right.plot(*zip(*sorted(curve), strict=True), "o-", label=name, linewidth=1.5)
        right.set_xscale("log", base=2)
        ticks = sorted({chunks for curve in curves.values() for chunks, _ in curve})
        right.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        right.minorticks_off()
        right.set_ylim(bottom=0)
        right.set(xlabel="chunks", ylabel="seconds a step")
        right.legend(frameon=False, fontsize="small")
    figure.savefig(path)
    return path
