"""Measurement of a run of a few steps in separate processes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from common.errors import PlanError
from conf.schema import Root
from launchers import WorkerFailed, World, call_in_workers
from parallel.timeline import Interval, Steps, busy_seconds, steady_steps, step_seconds
from planner.search import Candidate
from training.callbacks import Callback, TrainingRun
from training.reporting.metrics import after_warmup
from training.run.prepare import PlannedRun, prepare
from training.studies.short_run import run_on_rank, short_run

_FEWEST_STEPS, _MOST_STEPS = 8, 200


@dataclass(frozen=True)
class Trial:
    """The measurements of a short run.

    Attributes:
        seconds: Seconds per step: the lower quartile after the warm-up, because some steps are disturbed.
        peak: The peak memory of the fullest rank, in bytes.
        busy: Seconds per step in which the busiest rank computes; None on a GPU, where they cannot be measured.
        idle: Seconds per step in which a pipeline's busiest rank waits; None without a pipeline.
        steps: The timelines of the newest steps of a pipeline's ranks.
        problem: The reason why there are no measurements; empty if the run has succeeded.
    """

    seconds: float = 0.0
    peak: int = 0
    busy: float | None = None
    idle: float | None = None
    steps: dict[int, list[list[Interval]]] = field(default_factory=dict)
    problem: str = ""


def try_layout(cfg: Root, candidate: Candidate, seconds: float) -> Trial:
    """Train in a candidate's layout for about ``seconds`` seconds."""
    steps = int(min(_MOST_STEPS, max(_FEWEST_STEPS, seconds / candidate.seconds.total)))
    layout, watch = candidate.layout.keys(), {"callbacks": [{"_target_": "training.studies.planning.trial.Watch"}]}
    train = {"activation_checkpointing": layout.pop("activation_checkpointing")}
    trial = short_run(cfg, layout, watch, **train, steps=steps, eval_every=None, checkpoint_every=None)
    try:
        setup = prepare(trial)
        plan = setup.plan
        with tempfile.TemporaryDirectory() as folder:
            found = call_in_workers(_watched, (PlannedRun(setup.cfg, plan), Path(folder)), plan.processes)
    except PlanError as error:
        return Trial(problem=str(error))
    except WorkerFailed as failed:  # a killed worker ran out of memory
        return Trial(problem="out of memory" if failed.kind == "signal" else failed.text.strip().splitlines()[-1][:200])
    summaries, took, busy, measured = zip(*found, strict=True)
    done = {rank: measured[rank] for rank in plan.mesh(0).pipeline(0) if plan.pipelined}
    busiest, idle = max(busy) if plan.device_type == "cpu" else None, _idle([*done.values()]) if done else None
    return Trial(took[0], max(summaries[0]["peak_memory_bytes"]), busiest, idle, done)


def _watched(world: World, *run: Any) -> tuple[dict[str, Any], float, float, Sequence[Sequence[Interval]]]:
    """Run on one rank. Return the summary and the measurements of ``Watch``."""
    return run_on_rank(world, *run), *Watch.found


def _idle(ranks: Sequence[Steps]) -> float:
    """Return the seconds per step in which the busiest rank is idle until the last rank has finished."""
    steps = steady_steps(ranks)
    return sum(step_seconds(ranks, index) for index in steps) / len(steps) - max(busy_seconds(ranks))


class Watch(Callback):
    """Measures the seconds of a step, the computing time of a rank's thread, and the newest steps of a pipeline."""

    found: ClassVar[tuple[float, float, Sequence[Sequence[Interval]]]] = (0.0, 0.0, ())  # in this process

    def __init__(self) -> None:
        self._clock, self._took, self._busy = time.thread_time(), [], []

    def on_step(self, run: TrainingRun, record: Mapping[str, Any]) -> None:
        """Record the step's time, and the computing time since the last step."""
        self._took.append(record["step_time_s"])
        self._busy.append(-self._clock + (now := time.thread_time()))
        self._clock = now

    def on_end(self, run: TrainingRun, summary: Mapping[str, Any]) -> None:
        """Keep the records for ``_watched``."""
        timeline = run.strategy.timeline
        took, busy = (float(np.quantile(after_warmup(times), 0.25)) for times in (self._took, self._busy))
        Watch.found = took, busy, [] if timeline is None else [*timeline.steps]
