"""The training loop: one optimizer step after the other, and what is written down about each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from data.batch import Batch
from data.loader import TrainBatches, train_loader
from launchers import heartbeat, stopping
from launchers.stopping import Stopped
from parallel.strategy import StepResult, Strategy
from training.checkpoint import Checkpoints
from training.config import instantiate
from training.evaluate import evaluate, record_of
from training.optimizer import Optimizer
from training.profiling import profiler
from training.reporting import StepTimes, jsonable
from training.rollback import roll_back
from training.setup import Setup
from training.skipping import Skipping

_RESUMED = ("first_loss", "final_loss", "best_val_loss", "best_step")  # of Outcome


@dataclass
class Outcome:
    """What the loop found, for summary.json."""

    steps: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    skipped: int = 0
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
        self.skipping = Skipping(self.config)
        self.outcome = Outcome()
        self._loaded_step = 0

    def run(self, first_step: int = 1, unevaluated: bool = False) -> Outcome:
        """All steps from ``first_step`` on, with the evaluations and checkpoints between and after them.

        unevaluated  as rank 0 says: the evaluation that was due after the step before ``first_step`` is still to do
        raises       Stopped, on all ranks at the same border, where one was told to stop; what was trained is saved
        """
        config, total = self.config, self.setup.total_steps
        self._begin(first_step - 1, unevaluated)
        folder = self.checkpoints.folder.parent
        clock = time.perf_counter()
        with profiler(config.profile, folder, self.strategy.mesh.rank) as advance, self._anomaly_detection():
            for step, batch in self._batches(first_step):
                result, lr, skipped = self._step(step, batch)
                now = time.perf_counter()
                self._note(step, result, lr, skipped, seconds=now - clock)
                advance()
                if step == first_step and self._saves_on_the_way():
                    self.checkpoints.make_room(self.strategy, self.optimizer)
                stop = result.stop and step < total
                if due(config.eval_every, step, total) and not stop:
                    stop = not self._evaluate(step)
                if stop:
                    self.stop(step)
                if due(config.checkpoint_every, step, total) or self._is_best(step):
                    self._save(step, needed=step == total)
                self._complain()
                heartbeat.note(step, "reading data")
                clock = time.perf_counter()
        return self.outcome

    def stop(self, step: int) -> NoReturn:
        """Save what ``step`` and those before have trained, unless it is saved already, and raise Stopped."""
        if step > self._loaded_step:
            self._save(step, needed=True)
        where = f"saved in {self.outcome.checkpoint}" if self.outcome.checkpoint else "nothing was new to save"
        raise Stopped(f"stopped after step {step} of {self.setup.total_steps}, {where}")

    def _begin(self, done: int, unevaluated: bool) -> None:
        """``done`` steps are behind, and saved."""
        self.outcome.steps = self._loaded_step = done
        heartbeat.note(done, "meeting the other ranks")
        stops, unevaluated = self.strategy.sum_of(stopping.wanted(), unevaluated)
        if stops or (unevaluated and not self._evaluate(done)):
            self.stop(done)
        if self._is_best(done):
            self._save(done, needed=False)
        heartbeat.note(done, "reading data")

    def _step(self, step: int, batch: Batch) -> tuple[StepResult, float, str]:
        """Gradients, clipping, update; the last is why the update was left out, in words, or empty. Every rank takes
        the same decisions: they follow from agreed numbers."""
        strategy, config = self.strategy, self.config
        heartbeat.note(step - 1, f"in step {step}")
        result = strategy.train_step(batch, step, stopping.wanted(), self.skipping.loss_limit)
        lr = self.optimizer.base_lr * self.schedule.factor(step, self.setup.total_steps, self.setup.per_epoch)
        strategy.loss_scale.update(result.finite)
        skipped = self.skipping.judge(step, result)
        if skipped:
            if self.skipping.rolls_back:
                self.checkpoints.settle()
                self.say(f"step {step}: {roll_back(self.checkpoints.folder, strategy, self.optimizer)}")
            return result, lr, skipped
        norm = result.grad_norm
        if config.clip_value is not None:
            strategy.clip_grad_value_(config.clip_value)
            norm = strategy.grad_norm()
        if config.grad_clip is not None:
            strategy.clip_grad_norm_(config.grad_clip, norm)
        self.optimizer.step(lr)
        return result, lr, ""

    def _note(self, step: int, result: StepResult, lr: float, skipped: str, seconds: float) -> None:
        outcome, setup = self.outcome, self.setup
        outcome.steps, outcome.skipped = step, self.skipping.skipped
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
        line["skipped"] = bool(skipped)
        self.record(line)
        self.show(step, result.loss, line["samples_per_s"], line.get("tokens_per_s"), skipped)

    def _evaluate(self, step: int) -> bool:
        """False where it was stopped on the way."""
        if self.setup.data.valid is None:
            return True
        heartbeat.note(step, "evaluating")
        try:
            result = evaluate(self.strategy, self.setup.data.valid, self.config.eval_batches)
        except Stopped:
            return False
        record = record_of(result, "val", language=self.setup.tokens_per_sample is not None)
        if result["loss"] < (math.inf if self.outcome.best_val_loss is None else self.outcome.best_val_loss):
            self.outcome.best_val_loss, self.outcome.best_step = result["loss"], step
        self.record({"step": step, **record})
        self.say(f"step {step}: " + "  ".join(f"{k} {v:.4g}" for k, v in record.items()))
        return True

    def _is_best(self, step: int) -> bool:
        """Whether ``step`` has the lowest validation loss so far, and checkpoints are wanted at all."""
        return self.outcome.best_step == step and self.config.checkpoint_every is not None

    def _saves_on_the_way(self) -> bool:
        """Whether checkpoints are to be written while training goes on, for their step or for their evaluation."""
        config, total = self.config, self.setup.total_steps
        if config.checkpoint_every is None:
            return False
        return any(every is not None and 0 < every < total for every in (config.checkpoint_every, config.eval_every))

    def _save(self, step: int, needed: bool) -> None:
        """``needed``: wait until it is on the disk, and raise CheckpointError where it cannot be written."""
        heartbeat.note(step, "saving a checkpoint")
        progress = jsonable(self.progress())
        self.outcome.checkpoint = self.checkpoints.save(self.strategy, self.optimizer, step, progress, wait=needed)

    def _complain(self) -> None:
        """Say why a save in the background has failed, once."""
        problem = self.checkpoints.complaint()
        if problem is not None:
            self.say(f"warning: {problem}; training goes on, the last good checkpoint stays")

    def progress(self) -> dict:
        """What a checkpoint keeps of the run beside its tensors: all that the loop needs to go on as if nothing was."""
        outcome = self.outcome
        numbers = {key: getattr(outcome, key) for key in _RESUMED}
        return {**numbers, "skipping": self.skipping.state_dict()}

    def restore(self, progress: dict, path: Path | None) -> None:
        """Take ``progress()`` of the run that is gone on with, and where it was saved."""
        self.outcome.checkpoint = path
        for key in _RESUMED:
            setattr(self.outcome, key, progress.get(key))
        if "skipping" in progress:
            self.skipping.load_state_dict(progress["skipping"])
            self.outcome.skipped = self.skipping.skipped

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


def due(every: int | None, step: int, total: int) -> bool:
    """N: every N steps and at the end; 0: at the end; None: never."""
    if every is None:
        return False
    return step == total or (every > 0 and step % every == 0)
