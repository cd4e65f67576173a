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
    """Return a figure of columns x rows axes without frames, each ``width`` inches wide."""
    figure = Figure(figsize=(width * columns, 4.2 * rows), layout="constrained", dpi=150)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def bars(axes: Axes, spreads: Mapping[str, Spread], unit: str, ours: Sequence[str] = ()) -> None:
    """Draw the median of each spread as a bar, with whiskers from fastest to slowest; ``ours`` are coloured."""
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


def save_bars(path: Path, rows: Sequence[Mapping], ours: Sequence[str], width: float, title: str) -> None:
    """Write a PNG of one bar per row to ``path``; ``width`` is in inches, ``title`` says what the bars show."""
    figure, (axes,) = canvas(width=width)
    bars(axes, {row["run"]: Spread.read(row) for row in rows}, "seconds a step", ours)
    axes.set_title(title)
    figure.savefig(path)
    print(f"figure: {path}")


# What ``pipelined`` is compared with, by what it stands for. (The others of the table are variants of ``pipelined``.)
_CONTENDERS = {
    "one core": ("single",),
    "both cores without a pipeline": ("single, 2 threads",),
    "other pipelines": ("torchgpipe, tuned", "fairscale, tuned", "torchgpipe", "fairscale"),
}


def speed(path: Path, rows: Sequence[Mapping]) -> Path:
    """Write a PNG of how many times as fast ``pipelined`` is as each contender; returns ``path``."""
    factors = {(row["model"], row["run"]): float(row["pipelined is faster by"].rstrip("x")) for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    groups = {
        about: [run for run in runs if any((model, run) in factors for model in models)]
        for about, runs in _CONTENDERS.items()
    }
    shown = [run for runs in groups.values() for run in runs]
    figure, (axes,) = canvas(width=9.0)
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
    figure.savefig(path)
    return path


def chunks(path: Path, swept: Sequence[Mapping]) -> Path:
    """Write a PNG of the seconds per step over the number of chunks, one panel per model; returns ``path``."""
    models = list(dict.fromkeys(row["model"] for row in swept))
    figure, axes = canvas(columns=len(models), width=4.5)
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
    figure.suptitle(f"A few micro-batches are enough on two cores: the fastest steps have {most} chunks")
    figure.savefig(path)
    return path
