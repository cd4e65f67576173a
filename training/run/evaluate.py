"""Evaluation: every sample counts once, whatever the number of replicas and the batch size."""

from __future__ import annotations

import math
import time
from typing import Any

from torch import Tensor

from data.dataset import Source
from data.loader import EvalBatches
from data.read_ahead import read_ahead
from launchers import heartbeat, stopping
from launchers.stopping import Stopped
from models.losses import means
from parallel.outputs import Taker
from parallel.strategy import Strategy
from training.reporting.recorder import Recorder
from training.run.split_metrics import SplitMetrics

IGNORED_TARGETS = (
    "the loss ignores all of them, as it does for rows without a message that counts (the first lines of the run list "
    "the roles) and for rows whose answers lie beyond data.seq_len; raise data.seq_len, or correct the targets"
)
_ASK_EVERY_S = 1.0


def evaluate(strategy: Strategy, source: Source, limit: int | None, taker: Taker | None = None) -> dict[str, float]:
    """Evaluate the model on a split. All ranks call this together.

    Args:
        strategy: The model.
        source: The split.
        limit: The largest number of global batches; None for the whole split.
        taker: Gets the outputs of the last layer, on rank 0.

    Returns:
        "loss", the mean over all terms, and the mean of each metric of the loss. For each part of a mixture, the same
        numbers of its samples with its name: "loss_wiki". Without those whose targets do not count, because no mean
        exists then.

    Raises:
        Stopped: A rank was told to stop, at most about a second ago. All ranks raise it after the same batch.
    """
    plan, mesh = strategy.plan, strategy.mesh
    batches = EvalBatches(source, plan.global_batch_size, mesh.replica, mesh.dp, limit=limit)
    totals: dict[str, Tensor] = {}
    parts = (name for name, count in batches.counts.items() for _ in range(count))
    begin, asked = time.perf_counter(), 1
    read = read_ahead(batches, pin_memory=strategy.device.type == "cuda", timeout_s=strategy.options.timeout_s)
    for done, (part, batch) in enumerate(zip(parts, read, strict=True), 1):
        heartbeat.note(heartbeat.here().step, f"evaluating, batch {done} of {len(batches)}")
        sums = strategy.eval_step(batch, done, taker)
        totals[part] = totals[part] + sums if part in totals else sums
        if done == asked < len(batches):  # all ranks agree on the number of batches until the next check
            stops, seconds = strategy.sum_of(stopping.wanted(), (time.perf_counter() - begin) / mesh.size)
            if stops:
                raise Stopped(f"stopped in an evaluation, after batch {done} of {len(batches)}")
            asked += max(1, int(_ASK_EVERY_S * done / max(seconds, 1e-6)))
    loss, sums = strategy.chain.loss, {part: strategy.all_sum(total) for part, total in totals.items()}
    result = means(loss, [*map(sum, zip(*sums.values(), strict=True))])
    of_parts = {part: means(loss, own) for part, own in sums.items() if part}
    return result | {f"{name}_{part}": value for part, named in of_parts.items() for name, value in named.items()}


def evaluate_split(setup: Any, strategy: Strategy, split: str, recorder: Recorder) -> dict[str, float]:
    """Evaluate on the split "val" or "test" of a run; return the results by their names in metrics.jsonl.

    The results include those of ``metrics``, whose pictures are drawn into the run directory. If the loss is a mean
    over tokens, they include a perplexity. It is computed from the metric "token_loss" if the loss has this metric (a
    loss with auxiliary terms does), otherwise from the loss. The result is empty if the run does not have the split, or
    if no target counts. A warning is printed if there are no results, or if a result is not finite.
    """
    source = setup.data.valid if split == "val" else setup.data.test
    if source is None:
        return {}
    metrics = SplitMetrics(setup.cfg.metrics, strategy.chain.loss) if setup.cfg.metrics else None
    result = evaluate(strategy, source, setup.cfg.train.eval_batches, metrics)
    if not result:
        recorder.say(f"warning: no target of this evaluation counts, so it has no loss: {IGNORED_TARGETS}")
        return {}
    record = {f"{split}_{name}": value for name, value in result.items()}
    if setup.of_tokens:
        perplexity = math.exp(min(result.get("token_loss", result["loss"]), 700.0))
        record.setdefault(f"{split}_perplexity", perplexity)  # the loss may have a metric of this name
    if wrong := ", ".join(f"{name} is {value}" for name, value in record.items() if not math.isfinite(value)):
        recorder.say(
            f"warning: {wrong}: in an evaluation, samples, weights or BatchNorm's running statistics give these; "
            "correct the samples, or train with a lower optim.lr, or with more than "
            f"train.global_batch_size={setup.plan.global_batch_size}"
        )
    return record if metrics is None else record | metrics.results(strategy.mesh, recorder.run_dir, split)
