"""The pipeline diagram of one measured step. Imports matplotlib, so import this only when there is one to draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from parallel.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    WORK,
    Interval,
    work_span,
)

# The colours differ in lightness too, for print in grey and for colour-blind readers.
_COLOURS = {FORWARD: "#0072b2", BACKWARD: "#e69f00", BACKWARD_INPUT: "#e69f00", BACKWARD_WEIGHT: "#8fd3bd"}
_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward, inputs",
    BACKWARD_WEIGHT: "backward, weights",
}
_IDLE, _WAITING, _SENT = "#f0f0f0", "#c8c8c8", "#404040"
_WIDTH, _DPI = 12.0, 100  # inches, pixels per inch
_SMALLEST = 5.0  # points of a number that can still be read
_TOP, _BLOCK, _STRIP_TOP, _STRIP = -0.40, 0.62, 0.26, 0.10  # of a row of height 1, downwards from its middle

# What a neighbour receives of each kind of work.
_HANDS_ON = {FORWARD: RECEIVE_ACTIVATION, BACKWARD: RECEIVE_GRADIENT, BACKWARD_INPUT: RECEIVE_GRADIENT}

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Transfer:
    """A tensor that a stage receives from a neighbouring one.

    Attributes:
        kind: RECEIVE_ACTIVATION or RECEIVE_GRADIENT.
        stage: The receiving stage.
        microbatch: The micro-batch's index.
        posted: When the receive was posted, in seconds.
        ready: When the neighbour had finished computing the tensor, but not before ``posted``.
        used: From when on the tensor was used.
    """

    kind: str
    stage: int
    microbatch: int
    posted: float
    ready: float
    used: float


def transfers(step: Sequence[Interval]) -> list[Transfer]:
    """Return the receives of one step, given as the intervals of all ranks of one pipeline."""
    done = {(_HANDS_ON.get(i.kind), i.stage, i.microbatch): i.end for i in step}
    received = []
    for kind, stage, microbatch, posted, used in step:
        if kind in WORK:
            continue
        sender = stage - 1 if kind == RECEIVE_ACTIVATION else stage + 1
        ready = done.get((kind, sender, microbatch), posted)
        received.append(Transfer(kind, stage, microbatch, posted, min(max(posted, ready), used), used))
    return received


def draw(ranks: Mapping[int, Sequence[Interval]], title: str, subtitle: str) -> Figure:
    """Draw one row per rank: blocks numbered by micro-batch, and below them a thin strip of what the rank receives.

    Args:
        ranks: The intervals of one step by rank, in the order of the stages, in seconds on one clock.
        title: The figure's title.
        subtitle: The line below it.
    """
    height = 1.55 + len(ranks) * (0.8 if len(ranks) <= 8 else 0.5)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained", dpi=_DPI)
    axes = figure.add_subplot()
    handles = diagram(axes, ranks, 0.9 * _WIDTH)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    axes.set_title(subtitle, fontsize=10.5)
    columns = len(handles) if len(handles) <= 6 else 4
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def diagram(axes: Axes, ranks: Mapping[int, Sequence[Interval]], width: float) -> list[Patch]:
    """Draw the rows of ``draw`` on axes so many inches wide, and return the legend's handles."""
    everything = [i for step in ranks.values() for i in step]
    first, last = work_span(everything)
    span = 1e3 * (last - first)
    stages = [sorted({i.stage for i in step}) for step in ranks.values()]
    sizes = _font_sizes(everything, points_a_second=72 * width / (last - first))
    legend: dict[tuple[int, int], tuple[str, str]] = {}

    for row, (own, step) in enumerate(zip(stages, ranks.values(), strict=True)):
        _bar(axes, 0, span, row + _TOP, _BLOCK, color=_IDLE)
        for kind, stage, microbatch, start, end in step:
            if kind in WORK:
                loop = own.index(stage)
                colour = _lighter(_COLOURS[kind], loop / len(own))
                legend[WORK.index(kind), loop] = _NAMES[kind] + _stages_at(loop, stages), colour
                left, right = 1e3 * (start - first), 1e3 * (end - first)
                _bar(axes, left, right, row + _TOP, _BLOCK, facecolor=colour, edgecolor="white", lw=0.6)
                middle = (left + right) / 2, row + _TOP + _BLOCK / 2
                _number(axes, *middle, str(microbatch), colour, sizes(kind, end - start))
    row_of = {stage: row for row, own in enumerate(stages) for stage in own}
    moves = transfers(everything)
    for colour, ends in ((_WAITING, lambda t: (t.posted, t.ready)), (_SENT, lambda t: (t.ready, t.used))):
        for transfer in moves:
            left, right = (max(0.0, 1e3 * (end - first)) for end in ends(transfer))
            _bar(axes, left, right, row_of[transfer.stage] + _STRIP_TOP, _STRIP, color=colour)

    shown = [legend[key] for key in sorted(legend)] + [("idle (bubble)", _IDLE)]
    if moves:
        shown += [("receive: sender still computing", _WAITING), ("receive: sent, until used", _SENT)]
    _finish(axes, span, [_label(rank, own) for rank, own in zip(ranks, stages, strict=True)])
    return [Patch(facecolor=colour, edgecolor="#999999", lw=0.5, label=name) for name, colour in shown]


def _bar(axes: Axes, left: float, right: float, top: float, height: float, lw: float = 0.0, **colours) -> None:
    axes.add_patch(Rectangle((left, top), right - left, height, lw=lw, **colours))


def _number(axes: Axes, x: float, y: float, text: str, ground: Colour, size: float | None) -> None:
    if size is None:
        return
    dark = sum(weight * c for weight, c in zip((0.30, 0.59, 0.11), ground, strict=True)) < 0.5
    axes.text(x, y, text, color="white" if dark else "black", fontsize=size, ha="center", va="center_baseline")


def _font_sizes(step: Sequence[Interval], points_a_second: float) -> Callable[[str, float], float | None]:
    """Return a function from a block's kind and duration in seconds to the font size of its number.

    Each kind has one size, which fits its median block; a block that is too short for it gets None.
    """
    digits = len(str(max(i.microbatch for i in step)))
    sizes = {}
    for kind in {i.kind for i in step}:
        typical = median(i.end - i.start for i in step if i.kind == kind)
        sizes[kind] = min(11.0, typical * points_a_second / (0.75 * digits))

    def size(kind: str, seconds: float) -> float | None:
        fits = 0.62 * digits * sizes[kind] <= seconds * points_a_second
        return sizes[kind] if fits and sizes[kind] >= _SMALLEST else None

    return size


def _finish(axes: Axes, span: float, labels: list[str]) -> None:
    axes.set_xlim(-0.004 * span, 1.004 * span)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(10))
    axes.set_xlabel("ms from the first forward of the step")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _label(rank: int, stages: list[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}\n(rank {rank})"


def _stages_at(loop: int, stages: list[list[int]]) -> str:
    """Return which stages share a shade, such as " (stages 2-3)", where ranks have several."""
    if all(len(own) == 1 for own in stages):
        return ""
    alike = sorted(own[loop] for own in stages if loop < len(own))
    return f" (stages {alike[0]}-{alike[-1]})" if len(alike) > 1 else f" (stage {alike[0]})"


def _lighter(colour: str, share: float) -> Colour:
    return tuple(c + (1 - c) * 0.75 * share for c in to_rgb(colour))
