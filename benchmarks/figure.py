"""The benchmarks' figures, made from the rows of their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.timing import Spread

_WIDE = 7  # more names than this do not fit beside each other

BLUE, GREY, GREEN, ORANGE = "#0072b2", "#8a8a8a", "#009e73", "#d55e00"


def canvas(columns: int = 1, rows: int = 1, width: float = 6.0) -> tuple[Figure, list[Axes]]:
    """A figure of columns x rows axes without frames, each ``width`` inches wide."""
    drawing = Figure(figsize=(width * columns, 4.2 * rows), layout="constrained", dpi=150)
    axes = [drawing.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for one in axes:
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return drawing, axes


def bars(axes: Axes, spreads: Mapping[str, Spread], unit: str, ours: Sequence[str] = ()) -> None:
    """A bar for each name, its median, with whiskers from fastest to slowest; ``ours`` are coloured."""
    names = list(spreads)
    middle = [spreads[name].median for name in names]
    reach = [
        [spreads[name].median - spreads[name].fastest for name in names],
        [spreads[name].slowest - spreads[name].median for name in names],
    ]
    colours = [BLUE if name in ours else GREY for name in names]
    drawn = axes.bar(range(len(names)), middle, yerr=reach, color=colours, width=0.62, capsize=4, ecolor="#333333")
    axes.bar_label(drawn, [f"{value:.3g}" for value in middle], padding=3)
    if len(names) > _WIDE:
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    else:
        axes.set_xticks(range(len(names)), [name.replace(", ", ",\n").replace(" (", "\n(") for name in names])
    axes.set_ylabel(unit)


def curve(axes: Axes, points: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> None:
    """A line for each name through its (x, y) points; x is logarithmic."""
    for name, line in points.items():
        xs, ys = zip(*sorted(line), strict=True)
        axes.plot(xs, ys, "o-", label=name, linewidth=1.5)
    axes.set_xscale("log", base=2)
    ticks = sorted({px for line in points.values() for px, _ in line})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize="small")


def pipelining(path: Path, rows: Sequence[Mapping], swept: Sequence[Mapping]) -> Path:
    """For each model the contest's bars and, beside them, its sweep over chunks."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    drawing, axes = canvas(columns=2, rows=len(models))
    for index, model in enumerate(models):
        left, right = axes[2 * index : 2 * index + 2]
        spreads = {row["run"]: spread_of(row) for row in rows if row["model"] == model}
        bars(left, spreads, "seconds a step", ours=[n for n in spreads if n.startswith(("naive", "pipelined"))])
        left.tick_params(axis="x", labelsize="small")
        lines: dict[str, list] = {}
        for row in swept:
            if row["model"] == model:
                name = f"{row['run']} {row['schedule']}".strip()
                lines.setdefault(name, []).append((float(row["chunks"]), float(row["seconds a step"])))
        curve(right, lines, "chunks", "seconds a step")
        left.set_title(model)
    drawing.savefig(path)
    return path


def spread_of(row: Mapping) -> Spread:
    """What ``Spread.columns`` wrote into a row."""
    return Spread(*(float(row[key]) for key in ("seconds a step (median)", "fastest", "slowest")))
