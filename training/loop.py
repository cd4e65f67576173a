"""The training loop: one optimizer step after the other, and what is written down about each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from data.batch import Batch
from data.loader import TrainBatches, train_loader
from launchers.slurm_worker import Stopped, stop_wanted
from parallel.strategy import StepResult, Strategy
from training.checkpoint import Checkpoints
from training.errors import CheckpointError, TrainingError
from training.evaluate import evaluate, record_of
from training.instantiate import instantiate
from training.optimizer import Optimizer
from training.profiling import profiler
from training.records import StepTimes
from training.setup import Setup


@dataclass
class Outcome:
    """What the loop found, for summary.json."""

    steps: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    best_val_loss: float | None = None
    checkpoint: Path | None = None
    times: StepTimes = field(default_factory=StepTimes)


class Loop:
    """Training of one run on one rank. ``record`` takes each line of metrics.jsonl, ``show`` each step for the
    progress bar, ``say`` a sentence; on ranks other than 0 all three do nothing."""

    def __init__(
        self,
        setup: Setup,
        strategy: Strategy,
        optimizer: Optimizer,
        checkpoints: Checkpoints,
        record: Callable[[dict], None],
        show: Callable[..., None],
        say: Callable[[str], None],
    ) -> None:
        self.setup, self.strategy, self.optimizer, self.checkpoints = setup, strategy, optimizer, checkpoints
        self.record, self.show, self.say = record, show, say
        self.config = setup.cfg.train
        self.schedule = instantiate(setup.cfg.scheduler)
        self.outcome = Outcome()
        self._skipped_in_a_row = 0

    def run(self, first_step: int = 1) -> Outcome:
        """All steps from ``first_step`` on, with the evaluations and checkpoints between and after them."""
        config, total = self.config, self.setup.total_steps
        folder = self.checkpoints.folder.parent
        clock = time.perf_counter()
        with profiler(config.profile, folder, self.strategy.mesh.rank) as advance, self._anomaly_detection():
            for step, batch in self._batches(first_step):
                result, lr, skipped = self._step(step, batch)
                now = time.perf_counter()
                self._note(step, result, lr, skipped, seconds=now - clock)
                advance()
                if _due(config.eval_every, step, total):
                    self._evaluate(step)
                stop = result.stop and step < total
                if stop or _due(config.checkpoint_every, step, total):
                    self._save(step, needed=stop or step == total)
                if stop:
                    raise Stopped(f"stopped after step {step} of {total}, saved in {self.outcome.checkpoint}")
                clock = time.perf_counter()
        return self.outcome

    def _step(self, step: int, batch: Batch) -> tuple[StepResult, float, bool]:
        """Gradients, clipping, update. Every rank takes the same decisions: they follow from agreed numbers."""
        strategy, config = self.strategy, self.config
        result = strategy.train_step(batch, step, stop_wanted())
        lr = self.optimizer.base_lr * self.schedule.factor(step, self.setup.total_steps, self.setup.per_epoch)
        strategy.loss_scale.update(result.finite)
        if not result.finite:
            self._skip(step, result)
            return result, lr, True
        self._skipped_in_a_row = 0
        norm = result.grad_norm
        if config.clip_value is not None:
            strategy.clip_grad_value_(config.clip_value)
            norm = strategy.grad_norm()
        if config.grad_clip is not None:
            strategy.clip_grad_norm_(config.grad_clip, norm)
        self.optimizer.step(lr)
        return result, lr, False

    def _skip(self, step: int, result: StepResult) -> None:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > self.config.max_skipped:
            raise TrainingError(
                f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}, not finite for "
                f"{self._skipped_in_a_row} steps in a row (train.max_skipped={self.config.max_skipped}); try a lower "
                "optim.lr, a longer warm-up, train.grad_clip=1.0, or train.precision=fp32; debug=anomaly names the "
                "operation"
            )

    def _note(self, step: int, result: StepResult, lr: float, skipped: bool, seconds: float) -> None:
        outcome, setup = self.outcome, self.setup
        outcome.steps = step
        outcome.first_loss = result.loss if outcome.first_loss is None else outcome.first_loss
        outcome.final_loss = result.loss
        outcome.times.add(seconds)
        line = {
            "step": step,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "step_time_s": seconds,
            "samples_per_s": setup.plan.global_batch_size / seconds,
        }
        if setup.tokens_per_sample is not None:
            line["tokens_per_s"] = result.terms / seconds
        line["skipped"] = skipped
        self.record(line)
        note = "skipped: not finite" if skipped else ""
        self.show(step, result.loss, line["samples_per_s"], line.get("tokens_per_s"), note)

    def _evaluate(self, step: int) -> None:
        if self.setup.data.valid is None:
            return
        result = evaluate(self.strategy, self.setup.data.valid, self.config.eval_batches)
        record = record_of(result, "val", language=self.setup.tokens_per_sample is not None)
        best = self.outcome.best_val_loss
        self.outcome.best_val_loss = result["loss"] if best is None else min(best, result["loss"])
        self.record({"step": step, **record})
        self.say(f"step {step}: " + "  ".join(f"{k} {v:.4g}" for k, v in record.items()))

    def _save(self, step: int, needed: bool) -> None:
        try:
            self.outcome.checkpoint = self.checkpoints.save(self.strategy, self.optimizer, step)
        except CheckpointError as error:
            if needed:
                raise
            self.say(f"warning: {error}; training goes on, the last good checkpoint stays")

    def _batches(self, first_step: int) -> Iterator[tuple[int, Batch]]:
        setup, mesh = self.setup, self.strategy.mesh
        batches = TrainBatches(
            setup.data.train, setup.plan.global_batch_size, setup.cfg.seed, mesh.replica, mesh.dp
        )
        if self.config.overfit:
            batch = batches[1]
            return ((step, batch) for step in range(first_step, setup.total_steps + 1))
        return train_loader(
            batches, first_step, setup.total_steps, setup.data.num_workers, self.strategy.device.type == "cuda"
        )

    def _anomaly_detection(self):
        return torch.autograd.detect_anomaly(check_nan=True) if self.config.detect_anomaly else nullcontext()


def _due(every: int | None, step: int, total: int) -> bool:
    """N: every N steps and at the end; 0: at the end; None: never."""
    if every is None:
        return False
    return step == total or (every > 0 and step % every == 0)
