"""Inside a rank of a run: the next fault of the plan, at its point, by functions of the product that are wrapped."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from functools import wraps
from pathlib import Path

import psutil
from faults.plan import EVALUATION, MOMENT, SAVE, Fault, Record

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_LATE = 4  # steps that a save may take in the background


class Attempt:
    """What this process knows of itself: its rank, the attempt's number, and how far it has come."""

    def __init__(self, record: Record) -> None:
        self.record, self._faults = record, record.faults()
        self.step, self.done, self.saving = 0, 0, 0
        self.training = False

    def begin_run(self) -> None:
        """This process, a rank by now, begins a run. (It was forked from one that had imported all this.)"""
        self.rank = int(os.environ.get("RANK", 0))
        self.first = self.record.next_fault()
        self.look_up()
        (self.record.folder / f"rank-{self.rank}.pid").write_text(str(os.getpid()))

    def look_up(self) -> None:
        """Which fault is next: others may have struck without ending this process."""
        self.number = self.record.next_fault()
        self.fault = self._faults[self.number] if self.number < len(self._faults) else None

    def begin(self, step: int) -> None:
        """A training step begins. A fault that is far behind has had no chance."""
        self.record.note(f"begun-{self.first}-{self.rank}", {"first_step": step})
        self.step, self.training = step, True
        self.look_up()
        if self.fault is not None and step > self.fault.step + _LATE and self.fault.struck_by == self.rank:
            self.record.note(f"struck-{self.number}", {"missed": True})
            self.look_up()

    def reach(self, point: str, step: int, at: str = "before") -> None:
        """Strike where the fault is due here."""
        fault = self.fault
        if fault is None or (fault.point, fault.step, fault.at) != (point, step, at) or fault.struck_by != self.rank:
            return
        if fault.delay_s:
            threading.Timer(fault.delay_s, self.strike, [fault]).start()
        else:
            self.strike(fault)

    def strike(self, fault: Fault) -> bool:
        """Once only; whether it was now."""
        told = {"step": self.step, "done": self.done, "saving": self.saving, "time": time.time()}
        if not self.record.note(f"struck-{self.number}", told):
            return False
        if fault.kind in _SIGNALS:
            os.kill(self._victim(fault), _SIGNALS[fault.kind])
        return True

    def _victim(self, fault: Fault) -> int:
        if fault.kind == "term":
            launched = "RANK" in os.environ  # by the fork server of the launching process
            return psutil.Process().parent().ppid() if launched else os.getpid()
        if fault.rank == self.rank:
            return os.getpid()
        return int((self.record.folder / f"rank-{fault.rank}.pid").read_text())


def arm() -> None:
    """Wrap what the points of a step and of a save are."""
    attempt = Attempt(Record(Path(os.environ["FAULTS"])))
    _wrap_run(attempt)
    _wrap_steps(attempt)
    _wrap_saves(attempt)
    _wrap_end(attempt)


def _wrap_run(attempt: Attempt) -> None:
    from training import run as module

    run = module.run

    @wraps(run)
    def begun(*args, **kwargs):
        attempt.begin_run()
        return run(*args, **kwargs)

    module.run = begun


def _wrap_steps(attempt: Attempt) -> None:
    import torch.distributed as dist

    from parallel.sharding import local
    from parallel.stage import Stage
    from parallel.strategy import Strategy
    from training import loop
    from training.optimizer import Optimizer

    agree, forward = Strategy._agree, Stage.forward
    all_reduce, update, evaluate = dist.all_reduce, Optimizer.step, loop.evaluate

    def counted(train_step):
        @wraps(train_step)
        def run(self, batch, step, *args, **kwargs):
            attempt.begin(step)
            attempt.reach(MOMENT, step)
            try:
                return train_step(self, batch, step, *args, **kwargs)
            finally:
                attempt.training, attempt.done = False, step

        return run

    @wraps(forward)
    def watched(self, *args, **kwargs):
        if attempt.training:
            attempt.reach("forward", attempt.step)
        out = forward(self, *args, **kwargs)
        if attempt.training and out.requires_grad:
            out.register_hook(lambda gradient: attempt.reach("backward", attempt.step))
        return out

    @wraps(agree)
    def poisoned(self, *args, **kwargs):
        fault = attempt.fault
        if fault and fault.kind == "nan" and (fault.rank, fault.step) == (attempt.rank, attempt.step):
            if attempt.strike(fault):
                local(next(p for p in self.parameters() if p.grad is not None).grad).view(-1)[0] = float("nan")
        return agree(self, *args, **kwargs)

    @wraps(all_reduce)
    def announced(*args, **kwargs):
        fault = attempt.fault
        due = fault and (fault.point, fault.step, fault.rank) == ("all-reduce", attempt.step, attempt.rank)
        if attempt.training and due and not kwargs.get("async_op"):
            begun = all_reduce(*args, **kwargs, async_op=True)  # the others may have this rank's part, or half of it
            attempt.reach("all-reduce", attempt.step)
            return begun.wait() and None
        return all_reduce(*args, **kwargs)

    @wraps(update)
    def stepped(self, *args, **kwargs):
        attempt.reach("optimizer step", attempt.step)
        update(self, *args, **kwargs)
        attempt.reach("optimizer step", attempt.step, "after")

    @wraps(evaluate)
    def evaluated(*args, **kwargs):
        attempt.reach(EVALUATION, attempt.step)
        return evaluate(*args, **kwargs)

    Strategy.train_step, Strategy._agree, Stage.forward = counted(Strategy.train_step), poisoned, watched
    dist.all_reduce, Optimizer.step, loop.evaluate = announced, stepped, evaluated


def _wrap_saves(attempt: Attempt) -> None:
    from training.checkpoint import save as saving

    save = saving.Checkpointer.save

    @wraps(save)
    def counted(self, step, *args, **kwargs):
        self.wait_pending()  # so that what is written from now on is this step's
        attempt.saving = step
        return save(self, step, *args, **kwargs)

    def phase(function, point: str):
        @wraps(function)
        def watched(*args, **kwargs):
            attempt.reach(point, attempt.saving)
            found = function(*args, **kwargs)
            attempt.reach(point, attempt.saving, "after")
            return found

        return watched

    saving.Checkpointer.save = counted
    for point in SAVE:
        setattr(saving, point, phase(getattr(saving, point), point))


def _wrap_end(attempt: Attempt) -> None:
    """A run that comes to its end leaves the checksum of each rank's weights."""
    from parallel.sharding import local
    from parallel.strategy import Strategy

    close = Strategy.close

    @wraps(close)
    def closed(self):
        digest = hashlib.sha256()
        for _, parameter in self.named_parameters():
            digest.update(local(parameter.detach()).numpy().tobytes())
        told = {"weights": digest.hexdigest(), "stage": self.mesh.position, "replica": self.mesh.replica}
        attempt.record.note(f"end-{attempt.first}-{attempt.rank}", told)
        close(self)

    Strategy.close = closed
