"""Inside a rank of a run: the next fault of the plan, at its point, by functions of the product that are wrapped."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

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

    def begin_run(self, *_: Any) -> None:
        """This process, a rank by now, begins a run. (It was forked from one that had imported all this.)"""
        self.rank = int(os.environ.get("RANK", 0))
        self.first = self.record.next_fault()
        self.look_up()
        (self.record.folder / f"rank-{self.rank}.pid").write_text(str(os.getpid()))

    def look_up(self) -> None:
        """Which fault is next: others may have struck without ending this process."""
        self.number = self.record.next_fault()
        self.fault = self._faults[self.number] if self.number < len(self._faults) else None

    def begin_step(self, _: Any, batch: Any, step: int, *rest: Any) -> None:
        """A training step begins. A fault that is far behind has had no chance."""
        self.record.note(f"begun-{self.first}-{self.rank}", {"first_step": step})
        self.step, self.training = step, True
        self.look_up()
        if self.fault is not None and step > self.fault.step + _LATE and self.fault.struck_by == self.rank:
            self.record.note(f"struck-{self.number}", {"missed": True})
            self.look_up()
        self.reach(MOMENT)

    def end_step(self, *_: Any) -> None:
        self.training, self.done = False, self.step

    def reach(self, point: str, step: int | None = None, at: str = "before") -> None:
        """Strike where the fault is due here, in this training step if no other is given."""
        fault, step = self.fault, self.step if step is None else step
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
    import torch.distributed as dist

    from parallel.dtensor import local
    from parallel.stage import Stage
    from parallel.strategy import Strategy
    from training.checkpoint import save as saving
    from training.optimizer import Optimizer
    from training.run import loop
    from training.run import rank as running

    attempt = Attempt(Record(Path(os.environ["FAULTS"])))
    at, all_reduce = attempt.reach, dist.all_reduce

    def watch_backward(out: Any, *_: Any) -> None:
        if attempt.training and out is not None and out.requires_grad:
            out.register_hook(lambda gradient: at("backward"))

    def poison(strategy: Strategy, *_: Any) -> None:
        fault = attempt.fault
        if fault and fault.kind == "nan" and (fault.rank, fault.step) == (attempt.rank, attempt.step):
            if attempt.strike(fault):
                local(next(p for p in strategy.parameters() if p.grad is not None).grad).view(-1)[0] = float("nan")

    def announced(*args: Any, **kwargs: Any) -> Any:
        fault = attempt.fault
        due = fault and (fault.point, fault.step, fault.rank) == ("all-reduce", attempt.step, attempt.rank)
        if attempt.training and due and not kwargs.get("async_op"):
            begun = all_reduce(*args, **kwargs, async_op=True)  # the others may have this rank's part, or half of it
            at("all-reduce")
            return begun.wait() and None
        return all_reduce(*args, **kwargs)

    def begin_save(checkpointer: saving.Checkpointer, step: int, *_: Any) -> None:
        checkpointer.wait_pending()  # so that what is written from now on is this step's
        attempt.saving = step

    def leave_weights(strategy: Strategy) -> None:
        """A run that comes to its end leaves the checksum of each rank's weights."""
        digest = hashlib.sha256()
        for _, parameter in strategy.named_parameters():
            digest.update(local(parameter.detach()).cpu().numpy().tobytes())
        told = {"weights": digest.hexdigest(), "stage": strategy.mesh.position, "replica": strategy.mesh.replica}
        attempt.record.note(f"end-{attempt.first}-{attempt.rank}", told)

    _around(running, "run", attempt.begin_run)
    _around(Strategy, "train_step", attempt.begin_step, attempt.end_step)
    _around(Stage, "forward", lambda *_: attempt.training and at("forward"), watch_backward)
    _around(Strategy, "_agree", poison)
    _around(Strategy, "close", leave_weights)
    _around(Optimizer, "step", lambda *_: at("optimizer step"), lambda *_: at("optimizer step", at="after"))
    _around(loop, "evaluate_split", lambda *_: at(EVALUATION))
    _around(saving.Checkpointer, "save", begin_save)
    for point in SAVE:
        _around(
            saving, point, partial(_reach_save, attempt, point, "before"), partial(_reach_save, attempt, point, "after")
        )
    dist.all_reduce = announced


def _reach_save(attempt: Attempt, point: str, at: str, *_: Any) -> None:
    attempt.reach(point, attempt.saving, at)


def _around(owner: Any, name: str, before: Callable, after: Callable | None = None) -> None:
    """Have ``before(*args)`` precede a function, and ``after(result, *args)`` follow it, however it ends."""
    real = getattr(owner, name)

    @wraps(real)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = None
        try:
            result = real(*args, **kwargs)
            return result
        finally:
            if after is not None:
                after(result, *args)

    setattr(owner, name, watched)
