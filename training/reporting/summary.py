"""The results of all ranks at a run's end: the content of summary.json."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from parallel.devices import peak_memory_bytes
from parallel.dtensor import local
from parallel.pieces import Piece
from parallel.strategy import Strategy
from parallel.timeline import Interval, Recording, bubble_fraction, on_one_clock
from training.reporting.metrics import after_warmup
from training.reporting.monitor import Monitor


@dataclass
class Outcome:
    """The results of a run so far.

    Attributes:
        steps: The number of the last step.
        best: The best value of ``train.monitor``.
        best_step: The step after which ``best`` was measured.
        evaluated: The last step after which the validation split was evaluated.
        skipped: The number of steps without an update.
        checkpoint: The newest checkpoint.
        seconds: The duration of each step of this process.
        terms: The number of targets that counted in the losses of these steps. For text, this is the number of tokens
            without padding.
        at_peak_s: The seconds that the devices would have needed at their peak; 0 if their peak is unknown.
    """

    steps: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    best_val_loss: float | None = None
    best: float | None = None
    best_step: int | None = None
    evaluated: int = 0
    skipped: int = 0
    checkpoint: Path | None = None
    seconds: array = field(default_factory=partial(array, "d"))
    terms: float = 0.0
    at_peak_s: float = 0.0

    @property
    def step_time_s(self) -> float | None:
        """The median duration of a step after the warm-up, in seconds; None before the first step."""
        measured = after_warmup(self.seconds)
        return statistics.median(measured) if measured else None


class RankResult(NamedTuple):
    """The results that each rank sends to all ranks. The intervals of all ranks are on one clock."""

    peak_memory: int
    state_bytes: dict[str, int]
    step_time_s: float | None
    intervals: list[list[Interval]]


# The tensors that an optimizer keeps for a parameter.
StateOf = Callable[[nn.Parameter], dict[str, Piece]]


def gather_results(strategy: Strategy, outcome: Outcome, state_of: StateOf = lambda parameter: {}) -> list[RankResult]:
    """Return the results of all ranks, in the order of ranks. All ranks call this together."""
    if strategy.mesh.size > 1:
        dist.barrier()
    recording = Recording.of(strategy.timeline)
    own = sum(map(peak_memory_bytes, strategy.devices)), state_bytes(strategy, state_of), outcome.step_time_s
    gathered = strategy.mesh.gather((*own, recording))
    intervals = on_one_clock([Recording.parse(received) for *_, received in gathered])
    return [RankResult._make([*numbers, steps]) for (*numbers, _), steps in zip(gathered, intervals, strict=True)]


def state_bytes(strategy: Strategy, state_of: StateOf) -> dict[str, int]:
    """Return the bytes of memory that this rank's weights, gradients and optimizer state take between steps."""
    parameters = list(strategy.parameters())
    tensors = {
        "weights": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [piece.tensor for p in parameters for piece in state_of(p).values()],
    }
    # Several tensors may be views of one storage.
    pieces = {kind: [local(tensor).untyped_storage() for tensor in own] for kind, own in tensors.items()}
    return {kind: sum({s.data_ptr(): s.nbytes() for s in own}.values()) for kind, own in pieces.items()}


def summarize(
    setup: Any, strategy: Strategy, outcome: Outcome, test: dict[str, Any], ranks: list[RankResult]
) -> dict[str, Any]:
    """Return the content of summary.json. ``test`` has the results on the test split, ``ranks`` one entry per rank."""
    plan, step_time, text = strategy.plan, ranks[0].step_time_s, setup.of_tokens
    samples = plan.global_batch_size / step_time if step_time else None
    monitor, bubble = Monitor.of(setup.cfg.train), None
    if plan.pipelined:
        bubble = bubble_fraction([ranks[rank].intervals for rank in strategy.mesh.pipeline(0)])
    return {
        "model": setup.cfg.model.name,
        "parallel": plan.strategy,
        "device": plan.device_type,
        "world_size": plan.processes,
        **{axis: getattr(plan, axis) for axis in (*plan.DEGREES, "ep")},
        "shards": plan.shards,
        "chunks": plan.chunks,
        "schedule": plan.schedule,
        "precision": plan.precision,
        "parameters": plan.parameters,
        "steps": outcome.steps,
        "first_loss": outcome.first_loss,
        "final_loss": outcome.final_loss,
        "skipped_steps": outcome.skipped,
        "monitor": monitor.name,
        "monitor_direction": monitor.direction,
        "best_step": outcome.best_step,
        f"best_{monitor.name}": outcome.best,
        "best_val_loss": outcome.best_val_loss,
        **{"test_loss": None, "tested_weights": None, "tested_step": None, **test},
        "step_time_s": step_time,
        "samples_per_s": samples,
        "tokens_per_s": outcome.terms / len(outcome.seconds) / step_time if step_time and text else None,
        "mfu": outcome.at_peak_s / len(outcome.seconds) / step_time if step_time and outcome.at_peak_s else None,
        "peak_memory_bytes": [rank.peak_memory for rank in ranks],
        **{f"{kind}_bytes": [rank.state_bytes[kind] for rank in ranks] for kind in ranks[0].state_bytes},
        "bubble_fraction": bubble,
        "ideal_bubble_fraction": plan.ideal_bubble,
        "stages": [{"layers": list(stage.layers), "parameters": stage.parameters} for stage in plan.stages],
    }
