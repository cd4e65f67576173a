"""What is known at a run's end, by all ranks together: the content of summary.json."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist

from parallel.memory import stage_activations
from parallel.strategy import Strategy
from parallel.timeline import Interval, Recording, bubble_fraction, on_one_clock
from training.loop import Outcome
from training.reporting import peak_memory_bytes
from training.setup import Setup


class Rank(NamedTuple):
    """What the others must know of a rank at the end: bytes, seconds, and its newest steps' intervals."""

    peak_memory: int
    step_time: float | None
    intervals: list[list[Interval]]


def known_of_ranks(strategy: Strategy, outcome: Outcome) -> list[Rank]:
    """Every rank's numbers, its intervals on one clock. All ranks call it."""
    if strategy.mesh.size > 1:
        dist.barrier()
    recording = Recording.of(strategy.timeline)
    mine = (peak_memory_bytes(strategy.device), outcome.times.median_after_warmup(), recording)
    everyone = strategy.mesh.gather(mine)
    intervals = on_one_clock([recording for *_, recording in everyone])
    return [Rank(peak, seconds, steps) for (peak, seconds, _), steps in zip(everyone, intervals, strict=True)]


def summarise(setup: Setup, strategy: Strategy, outcome: Outcome, test: dict[str, float], ranks: list[Rank]) -> dict:
    """summary.json's content, ``test`` being the results on the test split, where there is one."""
    plan = setup.plan
    step_time = ranks[0].step_time
    samples = plan.global_batch_size / step_time if step_time else None
    tokens = setup.tokens_per_sample
    bubble = None
    if plan.pipelined and strategy.device.type == "cpu":  # a GPU's host clock does not see when its kernels run
        bubble = bubble_fraction([ranks[rank].intervals for rank in strategy.mesh.pipeline(0)])
    return {
        "model": setup.cfg.model.name,
        "parallel": plan.strategy,
        "device": plan.device_type,
        "world_size": plan.processes,
        "dp": plan.dp,
        "pp": plan.pp,
        "chunks": plan.chunks,
        "schedule": plan.schedule,
        "precision": plan.precision,
        "parameters": plan.parameters,
        "steps": outcome.steps,
        "first_loss": outcome.first_loss,
        "final_loss": outcome.final_loss,
        "skipped_steps": outcome.skipped,
        "best_val_loss": outcome.best_val_loss,
        **{"test_loss": None, **test},
        "step_time_s": step_time,
        "samples_per_s": samples,
        "tokens_per_s": samples * tokens if samples and tokens else None,
        "peak_memory_bytes": [rank.peak_memory for rank in ranks],
        "bubble_fraction": bubble,
        "ideal_bubble_fraction": plan.ideal_bubble,
        "stages": [
            {"layers": list(s.layers), "parameters": s.parameters, "activation_bytes": held}
            for s, held in zip(plan.stages, stage_activations(plan, setup.chain, setup.sample), strict=True)
        ],
    }
