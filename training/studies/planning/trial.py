"""A run of a few steps in separate processes, which leaves only its measurements."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import PlanError
from conf.instantiate import to_dict
from launchers import WorkerFailed, call_in_workers
from models.given import pack_given
from parallel.timeline import WORK, Interval, Steps, steady_steps, work_span
from planner.layout import PlannedLayout
from planner.search import Candidate
from training.callbacks import Callback, TrainingRun
from training.reporting.metrics import METRICS, after_warmup, read_records
from training.run.prepare import prepare
from training.studies.short_run import run_on_rank, short_run

_WATCHED = "watched-{}.json"
_FEWEST_STEPS, _MOST_STEPS = 8, 200


@dataclass(frozen=True)
class Trial:
    """The measurements of a short run.

    Attributes:
        seconds: Per step; the lower quartile after the warm-up, because some steps are disturbed.
        peak: The peak memory of the fullest rank, in bytes.
        busy: Seconds per step in which the busiest rank computed; None on a GPU, where it cannot be measured.
        idle: Seconds per step in which a pipeline's busiest rank waits; None without a pipeline.
        steps: The timelines of the newest steps of a pipeline's ranks.
        problem: The reason why there are no measurements; empty if there are some.
    """

    seconds: float = 0.0
    peak: int = 0
    busy: float | None = None
    idle: float | None = None
    steps: dict[int, list[list[Interval]]] = field(default_factory=dict)
    problem: str = ""


def lay_out(cfg: Any, layout: PlannedLayout) -> None:
    """Write a chosen layout into a configuration."""
    keys = layout.keys()
    cfg.train.activation_checkpointing = keys.pop("activation_checkpointing")
    cfg.parallel.update(keys)


def try_layout(cfg: Any, candidate: Candidate, seconds: float) -> Trial:
    """Train in a candidate's layout for about ``seconds`` seconds."""
    steps = int(min(_MOST_STEPS, max(_FEWEST_STEPS, seconds / candidate.seconds.total)))
    trial = short_run(cfg, steps=steps, eval_every=None, checkpoint_every=None)
    lay_out(trial, candidate.layout)
    trial.callbacks = [{"_target_": "training.studies.planning.trial.Watch"}]
    try:
        plan = prepare(trial).plan
    except PlanError as error:
        return Trial(problem=str(error))
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary, *_ = call_in_workers(run_on_rank, (to_dict(trial), folder, pack_given()), plan.processes)
        except WorkerFailed as failure:
            return Trial(problem=_reason(failure))
        watched = [json.loads((Path(folder) / _WATCHED.format(rank)).read_text()) for rank in range(plan.processes)]
        took = [record["step_time_s"] for record in read_records(Path(folder) / METRICS) if "step_time_s" in record]
    done = {
        rank: [[Interval(*interval) for interval in step] for step in watched[rank]["steps"]]
        for rank in plan.mesh(0).pipeline(0)
        if plan.pipelined
    }
    return Trial(
        float(np.quantile(after_warmup(took), 0.25)),
        max(summary["peak_memory_bytes"]),
        max(rank["busy"] for rank in watched) if plan.device_type == "cpu" else None,
        _idle([*done.values()]) if done else None,
        done,
    )


def _idle(ranks: Sequence[Steps]) -> float:
    """Return the seconds per step in which the busiest rank is idle until the last rank has finished."""
    steps, span, busy = steady_steps(ranks), 0.0, np.zeros(len(ranks))
    for index in steps:
        first, last = work_span([i for own in ranks for i in own[index]])
        span += last - first
        busy += [sum(i.end - i.start for i in own[index] if i.kind in WORK) for own in ranks]
    return (span - busy.max()) / len(steps)


class Watch(Callback):
    """Records the time that a rank's thread computed, and the newest steps of a pipeline."""

    def __init__(self) -> None:
        self._clock, self._busy = time.thread_time(), []

    def on_step(self, run: TrainingRun, record: Mapping[str, Any]) -> None:
        """Record the computing time since the last step."""
        self._busy.append(-self._clock + (now := time.thread_time()))
        self._clock = now

    def on_end(self, run: TrainingRun, summary: Mapping[str, Any]) -> None:
        """Write the records into the run directory."""
        timeline = run.strategy.timeline
        steps = list(timeline.steps) if timeline is not None else []
        found = {"busy": float(np.quantile(after_warmup(self._busy), 0.25)), "steps": steps}
        (run.run_dir / _WATCHED.format(run.strategy.mesh.rank)).write_text(json.dumps(found))


def _reason(failure: WorkerFailed) -> str:
    """Return the last line of the error. A worker that was killed ran out of memory."""
    return "out of memory" if failure.kind == "signal" else failure.text.strip().splitlines()[-1][:200]
