"""``train.trace``: draws a measured step of a pipeline, and writes a Chrome trace. Imports matplotlib: import late."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from parallel import timeline as kinds
from parallel.plan import Plan
from parallel.timeline import RECEIVES, WORK, Interval, Steps, bubble_fraction, steady_steps, step_seconds, work_span
from training.reporting import plot
from training.reporting.metrics import write_or_warn

PICTURE, EVENTS = "timeline.png", "timeline.json"
_MOST_STEPS = 5  # in the Chrome trace

# The colors also differ in lightness, for print in gray and for color-blind readers.
_LOOKS = {
    kinds.FORWARD: ("forward", plot.BLUE),
    kinds.BACKWARD: ("backward", plot.ORANGE),
    kinds.BACKWARD_INPUT: ("backward, inputs", plot.ORANGE),
    kinds.BACKWARD_WEIGHT: ("backward, weights", "#8fd3bd"),
}
_IDLE, _WAITING, _SENT = "#f0f0f0", plot.PALE, "#404040"
_OTHERS = (plot.GREEN, "#cc79a7", "#7f3c8d", "#56b4e9")  # kinds that are neither work nor receives
_SMALLEST = 5.0  # font size in points below which a number cannot be read
_TOP, _BLOCK, _STRIP_TOP, _STRIP = -0.40, 0.62, 0.26, 0.10  # of a row of height 1, downwards from its middle

# The tensor that a neighbor receives after each kind of work.
_HANDS_ON: dict[str, str] = dict.fromkeys((kinds.BACKWARD, kinds.BACKWARD_INPUT), kinds.RECEIVE_GRADIENT)
_HANDS_ON[kinds.FORWARD] = kinds.RECEIVE_ACTIVATION

Color = tuple[float, float, float]


def draw(ranks: Mapping[int, Sequence[Interval]], title: str, subtitle: str) -> Figure:
    """Draw one row per rank: blocks numbered by micro-batch, and below them a thin strip with the rank's receives.

    Intervals of other kinds, such as collectives, are drawn in the strip under the name of their kind.

    Args:
        ranks: The intervals of one step by rank, in the order of the stages, in seconds on one clock.
        title: The figure's title.
        subtitle: The line below it.
    """
    return _draw({subtitle: ranks}, title, plot.WIDE, 1.55 + len(ranks) * (0.8 if len(ranks) <= 8 else 0.5))


def beside(predicted: Mapping[int, Sequence[Interval]], measured: Mapping[int, Steps], title: str) -> Figure:
    """Draw a predicted step above the measured step of median duration, on the same scale.

    The arguments are those of ``draw``; ``measured`` has the newest steps of each rank.
    """
    ranks = list(measured.values())
    steps = steady_steps(ranks)
    drawn = step_of_median_duration(ranks, steps)
    name = f"measured, of median duration among {len(steps)} steps"
    both = {"predicted": predicted, name: {rank: own[drawn] for rank, own in measured.items()}}
    return _draw(both, title, plot.MEDIUM, 1.9 + 2 * len(predicted) * 0.8)


@plot.style()
def _draw(parts: Mapping[str, Mapping[int, Sequence[Interval]]], title: str, width: float, height: float) -> Figure:
    """Draw steps below each other on the same scale, each under its own title. The size is in inches."""
    figure = Figure(figsize=(width, height))
    rows, handles = figure.subplots(len(parts), sharex=True, squeeze=False)[:, 0], {}
    for axes, (name, step) in zip(rows, parts.items(), strict=True):
        handles |= {handle.get_label(): handle for handle in _rows(axes, step, width)}
        axes.set_title(name)
    span = 1e3 * max(last - first for first, last in map(_span, parts.values()))
    axes.set_xlim(-0.004 * span, 1.004 * span)
    axes.set_xlabel("ms from the first forward of the step")
    figure.suptitle(title, x=0.005, ha="left")
    columns = min(len(handles), int(width / 2))  # inches of an entry
    figure.legend(handles=[*handles.values()], loc="outside lower center", ncols=columns)
    return figure


def _span(ranks: Mapping[int, Sequence[Interval]]) -> tuple[float, float]:
    """Return the start of the first work of a step, and the end of the last work or collective."""
    intervals = [i for step in ranks.values() for i in step]
    first, last = work_span(intervals)
    return first, max([last, *(i.end for i in intervals if i.kind not in {*WORK, *RECEIVES})])


def _rows(axes: Axes, ranks: Mapping[int, Sequence[Interval]], width: float) -> list[Patch]:
    """Draw one row per rank, and return the handles of the legend. The width of the figure is in inches."""
    everything = [i for step in ranks.values() for i in step]
    first, last = _span(ranks)
    span = 1e3 * (last - first)
    stages = [sorted({i.stage for i in step}) for step in ranks.values()]
    row_of = {stage: row for row, own in enumerate(stages) for stage in own}
    points = 72 * 0.9 * width / span  # per millisecond
    digits = len(str(max(i.microbatch for i in everything)))
    others = sorted({i.kind for i in everything} - {*WORK, *RECEIVES})
    colors = dict(zip(others, _OTHERS, strict=False))
    done = {(_HANDS_ON.get(i.kind), i.stage, i.microbatch): i.end for i in everything}
    legend: dict[tuple[int, int], tuple[str, Color]] = {}

    def bar(start: float, end: float, top: float, height: float, **look: Any) -> tuple[float, float]:
        left, right = (min(max(0.0, 1e3 * (time - first)), span) for time in (start, end))
        axes.add_patch(Rectangle((left, top), right - left, height, **{"lw": 0.0, **look}))
        return left, right

    for row, (own, step) in enumerate(zip(stages, ranks.values(), strict=True)):
        bar(first, last, row + _TOP, _BLOCK, color=_IDLE)
        free = 0.0  # where the next number above a narrow block may begin
        for kind, stage, microbatch, start, end in sorted(step, key=lambda interval: interval.start):
            if kind in WORK:
                loop, (name, color) = own.index(stage), _LOOKS[kind]
                color = _lighter(color, loop / len(own))
                legend[WORK.index(kind), loop] = name + _stages_at(loop, stages), color
                left, right = bar(start, end, row + _TOP, _BLOCK, facecolor=color, edgecolor="white", lw=0.6)
                size = min(11.0, (right - left) * points / (0.75 * digits))
                if size < _SMALLEST and left >= free:  # of many narrow blocks, some are numbered, above the row
                    axes.text(left, row + _TOP, str(microbatch), fontsize=_SMALLEST, va="bottom", ha="left")
                    free = left + _SMALLEST * (0.75 * digits + 0.5) / points
                if size >= _SMALLEST:
                    ink = "white" if sum(np.multiply(color, (0.30, 0.59, 0.11))) < 0.5 else "black"
                    middle = (left + right) / 2, row + _TOP + _BLOCK / 2
                    axes.text(*middle, str(microbatch), color=ink, fontsize=size, ha="center", va="center_baseline")
            elif kind in RECEIVES:
                sender = stage - 1 if kind == kinds.RECEIVE_ACTIVATION else stage + 1
                ready = min(max(start, done.get((kind, sender, microbatch), start)), end)
                bar(start, ready, row_of[stage] + _STRIP_TOP, _STRIP, color=_WAITING)
                bar(ready, end, row_of[stage] + _STRIP_TOP, _STRIP, color=_SENT)
            elif kind in colors:
                bar(start, end, row + _STRIP_TOP, _STRIP, color=colors[kind])

    idle = "idle (bubble)" if len({*row_of.values()}) > 1 else "idle"
    shown = [legend[key] for key in sorted(legend)] + [(idle, _IDLE)]
    if any(i.kind in RECEIVES for i in everything):
        shown += [("receive: sender still computing", _WAITING), ("receive: sent, until used", _SENT)]
    shown += [(kind.replace("_", "-"), to_rgb(color)) for kind, color in colors.items()]
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    names = [f"{_named(own)}\n(rank {rank})" for rank, own in zip(ranks, stages, strict=True)]
    axes.set_yticks(range(len(ranks)), names)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(10))
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return [Patch(facecolor=color, edgecolor="#999999", lw=0.5, label=name) for name, color in shown]


def _named(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _stages_at(loop: int, stages: list[list[int]]) -> str:
    """Return the stages with the same shade, such as " (stages 2-3)"; empty if each rank has one stage."""
    if all(len(own) == 1 for own in stages):
        return ""
    alike = sorted(own[loop] for own in stages if loop < len(own))
    return f" (stages {alike[0]}-{alike[-1]})" if len(alike) > 1 else f" (stage {alike[0]})"


def _lighter(color: str, share: float) -> Color:
    red, green, blue = (c + (1 - c) * 0.75 * share for c in to_rgb(color))
    return red, green, blue


def write_timeline(run_dir: Path, plan: Plan, model: str, ranks: Sequence[Steps], last_step: int) -> None:
    """Write timeline.png and timeline.json into the run's directory.

    The picture shows the steady step of median duration on replica 0; the Chrome trace (open it in
    https://ui.perfetto.dev) has the newest five steady steps on all replicas.

    ``ranks`` has the intervals of each rank's newest steps, up to ``last_step``, all on one clock.
    """
    replicas = [plan.mesh(0).pipeline(replica) for replica in range(plan.dp)]
    first = [ranks[rank] for rank in replicas[0]]
    steps = steady_steps(ranks)
    drawn = step_of_median_duration(first, steps)
    bubble = {
        "this_step": bubble_fraction([[steps[drawn]] for steps in first]),
        "steady_steps": bubble_fraction(first),
        "ideal": plan.ideal_bubble,
    }
    layout = f"{plan.schedule}, {plan.pp} ranks, {plan.chunks} micro-batches of {plan.microbatch_size}"
    figure = draw(
        dict(zip(replicas[0], (steps[drawn] for steps in first), strict=True)),
        f"{model}: {layout}" + (f" (replica 0 of {plan.dp})" if plan.dp > 1 else ""),
        f"step {last_step + 1 + drawn}, of median duration among {len(steps)}.   Bubble: {bubble['this_step']:.1%} in "
        f"this step, {bubble['steady_steps']:.1%} over all {len(steps)}, ideal {bubble['ideal']:.1%}",
    )
    plot.save(figure, run_dir / PICTURE)
    shown = {last_step + 1 + i: i for i in steps[-_MOST_STEPS:]}
    origin = min((i.start for rank in chain(*replicas) for n in shown.values() for i in ranks[rank][n]), default=0.0)
    events = [_name("process", replica, 0, f"replica {replica}") for replica in range(plan.dp)]
    for replica, members in enumerate(replicas):
        for position, rank in enumerate(members):
            steps_shown = {number: ranks[rank][i] for number, i in shown.items()}
            events += _events(replica, 100 * position, rank, steps_shown, origin)
    other = {"model": model, "schedule": plan.schedule, "pp": plan.pp, "chunks": plan.chunks, "bubble_fraction": bubble}
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    write_or_warn(run_dir / EVENTS, json.dumps(content))


def step_of_median_duration(ranks: Sequence[Steps], steps: Sequence[int]) -> int:
    """Return the step with the median span of work over all ranks. ``steps`` are indices from the end."""
    spans = [step_seconds(ranks, index) for index in steps]
    return steps[spans.index(median_low(spans))]


def _events(pid: int, tid: int, rank: int, steps: Mapping[int, Sequence[Interval]], origin: float) -> list[dict]:
    """Return a rank's events: one thread for its work, and as many threads as receives overlap."""
    events = []
    free: list[float] = []  # when each thread of receives becomes free
    for number, step in steps.items():
        for interval in sorted(step, key=lambda i: i.start):
            works, lane = interval.kind in WORK, 0
            if not works:
                lane = 1 + next((n for n, end in enumerate(free) if end <= interval.start), len(free))
                free[lane - 1 : lane] = [interval.end]
            events.append(
                {
                    "name": f"{interval.kind.replace('_', ' ')} {interval.microbatch}",
                    "cat": "work" if works else "receive",
                    "ph": "X",
                    "pid": pid,
                    "tid": tid + lane,
                    "ts": round(interval.start * 1e6 - origin * 1e6, 3),
                    "dur": round((interval.end - interval.start) * 1e6, 3),
                    "args": {"step": number, "microbatch": interval.microbatch, "stage": interval.stage},
                }
            )
    names = [_named(sorted({i.stage for step in steps.values() for i in step})), *["receives"] * len(free)]
    return [_name("thread", pid, tid + lane, f"rank {rank}: {name}") for lane, name in enumerate(names)] + events


def _name(what: str, pid: int, tid: int, name: str) -> dict:
    return {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
