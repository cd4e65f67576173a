"""The benchmarks' figures, drawn from the rows of their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.timing import Spread

BLUE, GREY = "#0072b2", "#8a8a8a"
_MANY = 7  # more names than this do not fit beside each other


@contextmanager
def drawing(path: Path, width: float, mosaic: Sequence = "a", heights: Sequence | None = None) -> Iterator[list[Axes]]:
    """Yield axes without frames, and write them to ``path`` as a PNG.

    Args:
        path: Of the PNG.
        width: In inches, of all of them.
        mosaic: Which axes stand where, as in matplotlib's ``subplot_mosaic``.
        heights: Of the rows of the mosaic, if they are not all the same.
    """
    figure = Figure(figsize=(width, 4.2), layout="constrained", dpi=150)
    axes = list(figure.subplot_mosaic(mosaic, height_ratios=heights).values())
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.savefig(path)
    print(f"figure: {path}")


def bars(path: Path, rows: Sequence[Mapping], ours: Sequence[str], width: float, title: str) -> None:
    """Draw the median of each row as a bar, with whiskers from fastest to slowest.

    Args:
        path: Of the PNG.
        rows: Of a table.
        ours: The runs that are coloured.
        width: In inches.
        title: What the bars show.
    """
    names, spreads = [row["run"] for row in rows], [Spread.read(row) for row in rows]
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.fastest for spread in spreads]
    above = [spread.slowest - spread.median for spread in spreads]
    colours = [BLUE if name in ours else GREY for name in names]
    with drawing(path, width=width) as (axes,):
        drawn = axes.bar(range(len(rows)), medians, yerr=[below, above], color=colours, width=0.62, capsize=4)
        axes.tick_params(axis="x", labelsize="small")
        axes.bar_label(drawn, [f"{value:.3g}" for value in medians], padding=3)
        if len(rows) > _MANY:
            axes.set_xticks(range(len(rows)), names, rotation=35, ha="right")
        else:
            axes.set_xticks(range(len(rows)), [name.replace(", ", ",\n").replace(" (", "\n(") for name in names])
        axes.set_ylabel("seconds a step")
        axes.set_title(title)


# What ``pipelined`` is compared with, by what it stands for. (The others of the table are variants of ``pipelined``.)
_CONTENDERS = {
    "one core": ("single",),
    "both cores without a pipeline": ("single, 2 threads",),
    "other pipelines": ("torchgpipe, tuned", "fairscale, tuned", "torchgpipe", "fairscale"),
}


def speed(path: Path, rows: Sequence[Mapping]) -> None:
    """Draw how many times as fast ``pipelined`` is as each contender."""
    factors = {(row["model"], row["run"]): float(row["pipelined is faster by"].rstrip("x")) for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    groups = {
        about: [run for run in runs if any((model, run) in factors for model in models)]
        for about, runs in _CONTENDERS.items()
    }
    shown = [run for runs in groups.values() for run in runs]
    with drawing(path, width=9.0) as (axes,):
        for model, marker in zip(models, "osD^v<>", strict=False):
            points = [(factors[model, run], shown.index(run)) for run in shown if (model, run) in factors]
            axes.plot(*zip(*points, strict=True), marker, label=model, markersize=8)
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_yticks(range(len(shown)), shown)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("how many times as fast parallel=pipelined is (1: equally fast)")
        axes.grid(axis="y", color="#dddddd")
        ranges = []
        for about, runs in groups.items():
            found = [factors[model, run] for run in runs for model in models if (model, run) in factors]
            ranges += [f"{min(found):.1f} to {max(found):.1f}x as fast as {about}"] * bool(found)
        axes.set_title("A pipeline on two cores is " + ",\n".join(ranges), fontsize="medium")
        axes.legend(frameon=False)


def chunks(path: Path, swept: Sequence[Mapping]) -> None:
    """Draw the seconds per step over the number of chunks, one panel per model."""
    models = list(dict.fromkeys(row["model"] for row in swept))
    with drawing(path, width=4.5 * len(models), mosaic=[models]) as axes:
        best = []
        for model, panel in zip(models, axes, strict=True):
            curves: dict[str, list[tuple[float, float]]] = {}
            for row in swept:
                if row["model"] == model and row["run"].startswith("pipelined"):
                    curve = curves.setdefault(row["schedule"], [])
                    curve.append((float(row["chunks"]), float(row["seconds a step"])))
            for name, curve in curves.items():
                panel.plot(*zip(*sorted(curve), strict=True), "o-", label=name, linewidth=1.5)
            best.append(min((seconds, count) for curve in curves.values() for count, seconds in curve)[1])
            ticks = sorted({count for curve in curves.values() for count, _ in curve})
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
            panel.set_ylim(0, 1.08 * max(seconds for curve in curves.values() for _, seconds in curve))
            panel.set(xlabel="chunks", ylabel="seconds a step", title=model)
            panel.legend(frameon=False, fontsize="small", loc="lower left")
        low, high = min(best), max(best)
        most = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        axes[0].figure.suptitle(f"A few micro-batches are enough on two cores: the fastest steps have {most} chunks")
