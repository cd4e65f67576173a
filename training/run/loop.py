"""The training loop: optimizer steps, with evaluations and checkpoints in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from common.files import jsonable
from conf.instantiate import build
from data.dataset import Batch
from data.loader import train_loader
from launchers import heartbeat, stopping
from launchers.stopping import Stopped
from models.seeds import derive_seed, seed_generators
from parallel.step_result import StepResult
from parallel.strategy import Strategy
from training.callbacks import Callbacks, TrainingRun
from training.checkpoint.files import Checkpoint
from training.checkpoint.load import load_chosen
from training.checkpoint.save import Checkpointer, check_savable, files_of
from training.optimizer import Optimizer
from training.optimizer.groups import frozen_until
from training.reporting.console import numbers
from training.reporting.monitor import LOSS, MINIMIZE, Monitor, check_name
from training.reporting.recorder import Recorder
from training.reporting.summary import Outcome
from training.reporting.utilization import seconds_at_peak
from training.run.changes import recipe
from training.run.evaluate import evaluate_split
from training.run.first_not_finite import first_not_finite
from training.run.setup import Setup
from training.run.skipping import Skipping

# Attributes of Outcome that a checkpoint keeps.
_RESUMED = ("first_loss", "final_loss", "best_val_loss", "best", "best_step", "evaluated")
_PROFILER_WARM_UP = 3  # steps


class Loop:
    """The training of one run on one rank.

    Attributes:
        outcome: The results of the run so far.
    """

    def __init__(
        self,
        setup: Setup,
        strategy: Strategy,
        optimizer: Optimizer,
        checkpoints: Checkpointer,
        recorder: Recorder,
    ) -> None:
        """Keep the parts of a run."""
        self.setup, self.strategy, self.optimizer, self.checkpoints = setup, strategy, optimizer, checkpoints
        self.recorder, self.say = recorder, recorder.say
        self.config = SimpleNamespace(**setup.cfg.train)  # each read of the configuration itself takes microseconds
        self.monitor = Monitor.of(self.config)
        self.schedule = build("scheduler", setup.cfg.scheduler)
        self.skipping = Skipping(self.config)
        own = (recipe(setup, self.schedule), setup.evaluation) if strategy.mesh.rank == 0 else None
        self.recipe, evaluation = strategy.mesh.gather(own)[0]
        outputs = recorder.record, recorder.histogram, recorder.say
        view = TrainingRun(setup.cfg, checkpoints.folder.parent, strategy, *outputs, evaluation)
        self.callbacks = Callbacks(setup.cfg.callbacks, view)
        if hasattr(self.schedule, "on_evaluation"):  # it follows evaluations, and has a state as callbacks have
            self.callbacks.all["scheduler"] = self.schedule
        until = frozen_until(self.config.unfreeze, setup.chain)
        self.frozen = [(until[name], p) for name, p in strategy.named_parameters() if name in until]
        self.outcome = Outcome()
        self._at_peak = seconds_at_peak(setup) if strategy.mesh.rank == 0 else None  # of a number of the input
        self._begun = 0
        self._called: dict[str, Any] | None = None  # the callbacks' state after the last counted step; None: now

    def run(self, first_step: int = 1) -> Outcome:
        """Train from ``first_step`` to the last step, and return the outcome.

        Raises:
            Stopped: The run was told to stop. All ranks raise it after the same step, which is saved.
            TrainingError: The run cannot continue, or has ended without a step that counted.
        """
        strategy, config, total = self.strategy, self.config, self.setup.total_steps
        self._begin(first_step - 1)
        self.optimizer.train()
        run_dir, unchecked = self.checkpoints.folder.parent, config.checkpoint_every is not None
        clock = time.perf_counter()
        profiled = _profiler(config.profile, run_dir, strategy.mesh.rank) if config.profile else nullcontext()
        # Anomaly detection names the operation whose backward gave a NaN.
        anomaly = torch.autograd.detect_anomaly(check_nan=True) if config.detect_anomaly else nullcontext()
        with profiled as advance, anomaly:
            for step, batch in () if self._is_last(first_step - 1) else self._batches(first_step):
                heartbeat.note(step - 1, f"in step {step}")
                strategy.gradients.frozen = [parameter for until, parameter in self.frozen if step <= until]
                result = strategy.train_step(batch, step, stopping.wanted(), self.skipping.loss_limit)
                lr = self.optimizer.base_lr * self.schedule.factor(step, total, self.setup.per_epoch)
                skipped = self._update(step, batch, result, lr)
                if unchecked and not skipped:
                    check_savable(files_of(strategy, self.optimizer))  # now with the optimizer's tensors
                    unchecked = False
                self._record(step, batch, result, lr, skipped, seconds=time.perf_counter() - clock)
                if advance is not None:
                    advance()
                if result.stop and step < total:
                    self.stop(step)
                evaluated = is_due(config.eval_every, step, self._is_last(step)) and self._evaluate(step)
                last = self._is_last(step)  # a callback may have ended the run since
                self._save(step, last, best=evaluated and self._is_best())
                if last:
                    break
                heartbeat.note(step, "reading data")
                clock = time.perf_counter()
        self.optimizer.train(False)
        self.skipping.check_any_counted(self.outcome)
        if (reason := self.callbacks.run.stop_reason) is not None:
            self.say(f"stopped after step {self.outcome.steps} of {total}: {reason}")
        return self.outcome

    def _is_last(self, step: int) -> bool:
        """Return whether the run ends with this step: it is the last one, or a callback has ended the run."""
        return step == self.setup.total_steps or self.callbacks.run.stop_reason is not None

    def stop(self, step: int) -> NoReturn:
        """Save the state after ``step``, unless it is saved already, and raise Stopped."""
        heartbeat.note(step, "saving a checkpoint")
        with self.optimizer.evaluating():
            self._note_saved(self.checkpoints.save(self.skipping.counted, self.progress(), wait=True))
        where = f"saved in {self.outcome.checkpoint}" if self.outcome.checkpoint else "nothing was new to save"
        words = f"stopped after step {step} of {self.setup.total_steps}, {where}"
        raise Stopped(words, steps=max(0, self.skipping.counted - self._begun))

    def progress(self) -> dict:
        """Return the state that a checkpoint keeps, so that a resumed run continues as this one would."""
        numbers = {key: getattr(self.outcome, key) for key in _RESUMED}
        called = self.callbacks.state_dict() if self._called is None else self._called
        kept = {**numbers, "recipe": self.recipe, "skipping": self.skipping.state_dict(), "callbacks": called}
        kept |= {"monitor": self.monitor, "evaluation": self.callbacks.run.evaluation}
        if self.setup.earlier:
            kept["batches"] = {"samples": len(self.setup.data.train), "earlier": self.setup.earlier}
        if names := self.setup.data.class_names():
            kept["classes"] = names
        if (reason := self.callbacks.run.stop_reason) is not None:
            kept |= {"ended_of": self.setup.total_steps, "ended_at": self.callbacks.run.step, "stop_reason": reason}
        return jsonable(kept)

    def restore(self, checkpoint: Checkpoint, done: int, ended: bool) -> None:
        """Continue an earlier run.

        Args:
            checkpoint: The earlier run's checkpoint, which contains the result of ``progress()``.
            done: The last step that is not repeated. The steps between the checkpoint and this step were all skipped.
            ended: Whether no step is left to train, or a callback has ended the run before its last step.
        """
        step, now = checkpoint.step, self.callbacks.run.evaluation
        # An older checkpoint has no monitor: its best step is the step of the best validation loss.
        older = {"best": checkpoint.progress["best_val_loss"], "monitor": (LOSS, MINIMIZE), "evaluation": now}
        progress = {**older, "evaluated": step, **checkpoint.progress}
        for key in _RESUMED:
            setattr(self.outcome, key, progress[key])
        self.skipping.load_state_dict(progress["skipping"])
        self.outcome.checkpoint, self.outcome.skipped = checkpoint.folder, self.skipping.skipped + done - step
        comparable = progress["evaluation"] == now and tuple(progress["monitor"]) == self.monitor
        best = self.outcome.best_step
        if best is not None and not (comparable and (best == step or self.checkpoints.has(best))):
            self.outcome.best_val_loss = self.outcome.best = self.outcome.best_step = None
            self.say(
                f"the best weights begin anew: step {best} was the best by other validation data, or by another loss, "
                "train.monitor or train.eval_batches, or its checkpoint is missing"
            )
        self.skipping.counted = step
        self.callbacks.load_state_dict(progress["callbacks"])
        if ended:
            self.callbacks.run.stop_reason = progress.get("stop_reason")

    def _begin(self, done: int) -> None:
        """Stop, evaluate or save if this is still due after step ``done``. Its checkpoint is already written."""
        self.outcome.steps = self._begun = self.callbacks.run.step = done
        heartbeat.note(done, "meeting the other ranks")
        (stops,) = self.strategy.sum_of(stopping.wanted())
        if stops:
            self.stop(done)
        due = self.outcome.evaluated < done and is_due(self.config.eval_every, done, self._is_last(done))
        evaluated = due and self._evaluate(done)
        if evaluated or self._is_best():
            self._save(done, best=True)  # with the callbacks' state after the evaluation, which is not repeated
        heartbeat.note(done, "reading data")

    def _update(self, step: int, batch: Batch, result: StepResult, lr: float) -> str:
        """Clip and apply the gradients, or return why the update is skipped.

        All ranks take the same decisions, because the decisions depend only on numbers that are equal on all ranks.
        """
        strategy, config = self.strategy, self.config
        locate = partial(first_not_finite, strategy, batch, step)
        skipped = self.skipping.judge(step, result, locate, strategy.loss_scale.enabled)
        strategy.loss_scale.update(result)
        if skipped:
            if self.skipping.note:
                self.say(f"step {step} is {skipped}{self.skipping.note}")
            if self.skipping.rolls_back:
                self.say(f"step {step}: repeated loss spikes{self._roll_back()}")
            return skipped
        self.checkpoints.wait_copied()
        norm = result.grad_norm
        if config.clip_value is not None:
            strategy.clip_grad_value_(config.clip_value)
            norm = strategy.grad_norm()
        if config.grad_clip is not None:
            strategy.clip_grad_norm_(config.grad_clip, norm)
        # The noise of an optimizer is the same on every replica.
        seed_generators(strategy.device, derive_seed(self.setup.cfg.seed, step, "optim"))
        self.optimizer.step(lr)
        self.optimizer.average.after(step, self.setup.total_steps)
        return ""

    def _roll_back(self) -> str:
        """Load the newest checkpoint and return a phrase about the result. Batches since then are not read again."""
        self.checkpoints.wait_pending()
        choose = partial(Checkpoint.newest, self.checkpoints.folder, verify=True)
        with self.optimizer.evaluating():
            newest = load_chosen(choose, self.strategy, self.optimizer)
        if newest is None:
            return ", and there is no checkpoint yet to go back to (train.checkpoint_every)"
        self.skipping.counted = newest.step
        return f": restored the weights of step {newest.step}, continuing with the next batch"

    def _record(self, step: int, batch: Batch, result: StepResult, lr: float, skipped: str, seconds: float) -> None:
        outcome, setup = self.outcome, self.setup
        outcome.steps, outcome.skipped = step, self.skipping.skipped
        if result.terms:
            outcome.first_loss = result.loss if outcome.first_loss is None else outcome.first_loss
            outcome.final_loss = result.loss
        outcome.seconds.append(seconds)
        outcome.terms += result.terms
        record = {
            "step": step,
            "loss": result.loss,
            **result.metrics,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "step_time_s": seconds,
            "samples_per_s": setup.plan.global_batch_size / seconds,
        }
        if setup.of_tokens:
            record["tokens_per_s"] = result.terms / seconds
        if self._at_peak is not None:
            outcome.at_peak_s += (at_peak := self._at_peak * batch.input_tensors[0].numel() * setup.plan.dp)
            record["mfu"] = at_peak / seconds
        record["skipped"] = bool(skipped)
        self.recorder.step(record, note=skipped)
        self.callbacks.run.step = step
        if self.callbacks.all:
            # A resumed run repeats the steps that were skipped after the last counted step, and their evaluations.
            if not skipped:
                self._called = None
            elif self._called is None:
                self._called = deepcopy(self.callbacks.state_dict())
            self.callbacks.call("on_step", record)

    def _evaluate(self, step: int) -> bool:
        """Evaluate on the validation split, and return whether there is a loss. Stop the run if it is told to stop."""
        heartbeat.note(step, "evaluating")
        with self.optimizer.evaluating():
            try:
                record = evaluate_split(self.setup, self.strategy, "val", self.recorder)
            except Stopped:
                self.stop(step)
            outcome, loss = self.outcome, Monitor(LOSS, MINIMIZE)
            outcome.evaluated = step
            if not record:
                return False
            if loss.is_better(record[LOSS], outcome.best_val_loss):
                outcome.best_val_loss = record[LOSS]
            check_name("train.monitor", self.monitor.name, [*record])  # a function of metrics may not give it
            if self.monitor.is_better(record[self.monitor.name], outcome.best):
                outcome.best, outcome.best_step = record[self.monitor.name], self.skipping.counted
            self.recorder.record({"step": step, **record})
            self.say(f"step {step}: {numbers(record, self.setup.extents.get('val'))}")
            self.callbacks.call("on_evaluation", {"step": step, **record})
            return True

    def _is_best(self) -> bool:
        """Return whether these weights are the best so far by ``train.monitor``."""
        return self.outcome.best_step == self.skipping.counted > 0

    def _save(self, step: int, last: bool = False, best: bool = False) -> None:
        """Save a checkpoint if one is due after ``step``. It is named after the last step that counted."""
        heartbeat.note(step, "saving a checkpoint")
        self.checkpoints.connect()  # now: at the last save the store may be gone, for instance if torchrun was killed
        every = self.config.checkpoint_every
        if every is not None and (best or is_due(every, step, last)):
            with self.optimizer.evaluating():
                self._note_saved(self.checkpoints.save(self.skipping.counted, self.progress(), wait=last))

    def _note_saved(self, path: Path | None) -> None:
        if path is not None:
            self.outcome.checkpoint = path
            self.callbacks.call("on_checkpoint", path)

    def _batches(self, first_step: int) -> Iterator[tuple[int, Batch]]:
        setup, mesh = self.setup, self.strategy.mesh
        batches = setup.batches(mesh.replica)
        if self.config.overfit:
            batch = batches[1]
            # Each step gets a copy, because a first layer may work in place.
            return ((step, batch.map(torch.clone)) for step in range(first_step, setup.total_steps + 1))
        return train_loader(
            batches,
            first_step,
            setup.total_steps,
            setup.data.num_workers,
            pin_memory=self.strategy.device.type == "cuda",
            timeout_s=setup.cfg.parallel.timeout_s,
        )


def is_due(every: int | None, step: int, last: bool) -> bool:
    """Return whether a save or evaluation is due: every N steps and after the last one; only after the last if N=0."""
    return every is not None and (last or (every > 0 and step % every == 0))


@contextmanager
def _profiler(steps: int, run_dir: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Record ``steps`` steps with torch.profiler into ``run_dir/profile/rank_0000.json``, after three warm-up steps.

    Yields a function to call after each step. The file is a Chrome trace.
    """
    from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

    target = run_dir / "profile" / f"rank_{rank:04d}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=list(supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}),
        schedule=schedule(wait=_PROFILER_WARM_UP - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(target)),
    ) as recorder:
        yield recorder.step
