"""Evaluation: every sample once, whatever the number of replicas and the sizes."""

from __future__ import annotations

import math

from data.loader import EvalBatches
from data.source import Source
from parallel.strategy import Strategy


def evaluate(strategy: Strategy, source: Source, limit: int | None) -> dict[str, float]:
    """{"loss": mean over all terms, and one mean per metric of the loss}. All ranks call it together.

    limit  at most so many global batches; None: all of the source
    """
    plan, mesh = strategy.plan, strategy.mesh
    batches = EvalBatches(source, plan.global_batch_size, mesh.replica, mesh.dp, limit=limit)
    total = None
    for batch in batches:
        sums = strategy.eval_step(batch)
        total = sums if total is None else total + sums
    loss, count, *metrics = strategy.all_sum(total)
    return {
        "loss": loss / count,
        **{name: value / count for name, value in zip(strategy.chain.loss.metrics, metrics, strict=True)},
    }


def record_of(result: dict[str, float], prefix: str, language: bool) -> dict[str, float]:
    """As metrics.jsonl has it: val_loss and val_perplexity (language) or val_accuracy and so on."""
    record = {f"{prefix}_{name}": value for name, value in result.items()}
    if language:
        record[f"{prefix}_perplexity"] = math.exp(min(result["loss"], 700.0))
    return record
