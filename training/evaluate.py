"""Evaluation: every sample once, whatever the number of replicas and the sizes."""

from __future__ import annotations

import math
import time

from data.dataset import Source
from data.loader import EvalBatches
from launchers import heartbeat, stopping
from launchers.stopping import Stopped
from parallel.strategy import Strategy

_ASK_EVERY_S = 1.0


def evaluate(strategy: Strategy, source: Source, limit: int | None) -> dict[str, float]:
    """{"loss": mean over all terms, and one mean per metric of the loss}. All ranks call it together.

    limit   at most so many global batches; None: all of the source
    raises  Stopped, on all ranks after the same batch, about a second after one of them was told to stop
    """
    plan, mesh = strategy.plan, strategy.mesh
    batches = EvalBatches(source, plan.global_batch_size, mesh.replica, mesh.dp, limit=limit)
    border = _Border(strategy)
    total = None
    for done, batch in enumerate(batches, 1):
        heartbeat.note(heartbeat.here().step, f"evaluating, batch {done} of {len(batches)}")
        sums = strategy.eval_step(batch)
        total = sums if total is None else total + sums
        if done < len(batches) and border.stops(done):
            raise Stopped(f"stopped in an evaluation, after batch {done} of {len(batches)}")
    loss, count, *metrics = strategy.all_sum(total)
    return {
        "loss": loss / count,
        **{name: value / count for name, value in zip(strategy.chain.loss.metrics, metrics, strict=True)},
    }


class _Border:
    """Where the ranks ask each other whether to stop: after the first batch, then as often as makes about one question
    a second. By how many batches that is they agree in the question itself."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._next, self._begin = 1, time.perf_counter()

    def stops(self, done: int) -> bool:
        """Whether to stop after ``done`` batches; all ranks call it with the same number."""
        if done < self._next:
            return False
        seconds = time.perf_counter() - self._begin
        stops, seconds = self._strategy.sum_of(stopping.wanted(), seconds / self._strategy.mesh.size)
        self._next = done + max(1, int(_ASK_EVERY_S * done / max(seconds, 1e-6)))
        return stops > 0


def record_of(result: dict[str, float], prefix: str, language: bool) -> dict[str, float]:
    """As metrics.jsonl has it: val_loss and val_perplexity (language) or val_accuracy and so on."""
    record = {f"{prefix}_{name}": value for name, value in result.items()}
    if language:
        record[f"{prefix}_perplexity"] = math.exp(min(result["loss"], 700.0))
    return record
