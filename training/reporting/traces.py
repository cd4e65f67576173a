"""When things ran: ``train.trace`` draws a pipeline's step, ``train.profile`` records steps with torch.profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from statistics import median_low

from parallel.plan import Plan
from parallel.timeline import WORK, Interval, Steps, bubble_fraction, steady_steps, work_span
from training.reporting.metrics import write_or_warn

PICTURE, EVENTS = "timeline.png", "timeline.json"
_MOST_STEPS = 5  # in the Chrome trace
_PROFILER_WARM_UP_STEPS = 3


def why_no_timeline(plan: Plan) -> str | None:
    """Return why a run cannot be drawn, for its user; None where it can."""
    if not plan.pipelined:
        return (
            f"train.trace=true draws pipelines, parallel={plan.strategy} is none: no {PICTURE} will be written; "
            "train.profile=N records N steps of any run"
        )
    return None


def write_timeline(run_dir: Path, plan: Plan, model: str, ranks: Sequence[Steps], last_step: int) -> None:
    """Write timeline.png and timeline.json into the run's directory.

    The picture shows the steady step of median duration on replica 0; the Chrome trace (to be opened in
    https://ui.perfetto.dev) holds up to five steady steps around it on all replicas.

    ``ranks`` are the intervals of each rank's newest steps, up to ``last_step``, all on one clock.
    """
    from training.reporting.timeline_figure import draw

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
    picture = BytesIO()
    figure.savefig(picture)
    write_or_warn(run_dir / PICTURE, picture.getvalue())
    begin = max(steps[0], min(drawn - _MOST_STEPS // 2, -_MOST_STEPS))
    shown = {last_step + 1 + i: i for i in range(begin, min(begin + _MOST_STEPS, 0))}
    events = [
        event
        for replica, members in enumerate(replicas)
        for event in _events(replica, {rank: {n: ranks[rank][i] for n, i in shown.items()} for rank in members})
    ]
    origin = min((e["ts"] for e in events if e["ph"] == "X"), default=0.0)
    for event in events:
        if event["ph"] == "X":
            event["ts"] = round(event["ts"] - origin, 3)
    other = {"model": model, "schedule": plan.schedule, "pp": plan.pp, "chunks": plan.chunks, "bubble_fraction": bubble}
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    write_or_warn(run_dir / EVENTS, json.dumps(content))


def step_of_median_duration(ranks: Sequence[Steps], steps: Sequence[int]) -> int:
    """Return which of ``steps``, indices from the end, has the median span of work over all ranks."""
    spans = {}
    for index in steps:
        first, last = work_span([i for rank in ranks for i in rank[index]])
        spans[index] = last - first
    middle = median_low(spans.values())
    return next(index for index, span in spans.items() if span == middle)


def _events(replica: int, ranks: dict[int, dict[int, Sequence[Interval]]]) -> list[dict]:
    """Return one replica's events: a process, with a thread for each rank's work and some for what it receives."""
    events = [_name("process", replica, 0, f"replica {replica}")]
    for position, (rank, steps) in enumerate(ranks.items()):
        stages = sorted({i.stage for step in steps.values() for i in step})
        work = 100 * position
        label = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        events.append(_name("thread", replica, work, f"rank {rank}: {label}"))
        free: list[float] = []  # when each thread of receives becomes free: those of one thread must not overlap
        for number, step in steps.items():
            for interval in sorted(step, key=lambda i: i.start):
                lane = work
                if interval.kind not in WORK:
                    place = next((n for n, end in enumerate(free) if end <= interval.start), len(free))
                    free[place : place + 1] = [interval.end]
                    lane = work + 1 + place
                events.append(_complete(replica, lane, number, interval))
        events += [_name("thread", replica, work + 1 + n, f"rank {rank}: receives") for n in range(len(free))]
    return events


def _complete(pid: int, tid: int, step: int, interval: Interval) -> dict:
    return {
        "name": f"{interval.kind.replace('_', ' ')} {interval.microbatch}",
        "cat": "work" if interval.kind in WORK else "receive",
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": interval.start * 1e6,
        "dur": round((interval.end - interval.start) * 1e6, 3),
        "args": {"step": step, "microbatch": interval.microbatch, "stage": interval.stage},
    }


def _name(what: str, pid: int, tid: int, name: str) -> dict:
    return {"name": f"{what}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


@contextmanager
def profiler(steps: int, run_dir: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Record steps, after three of warm-up, with torch.profiler into ``run_dir/profile/rank_0000.json``.

    Yields a function to call after each step. The file is a Chrome trace.
    """
    from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

    target = run_dir / "profile" / f"rank_{rank:04d}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=list(supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}),
        schedule=schedule(wait=_PROFILER_WARM_UP_STEPS - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(target)),
    ) as recorder:
        yield recorder.step
