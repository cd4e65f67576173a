"""Saving without stopping: a copy is taken, a thread writes it, training goes on."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files import free_space
from training.checkpoint.commit import amend, commit, size_of
from training.checkpoint.manifest import make_manifest
from training.checkpoint.paths import draft_name, drafts, step_name
from training.checkpoint.room import Room, lower_priority
from training.checkpoint.snapshot import Share, copied, make_room, shares_of
from training.checkpoint.writing import write_share

_ROUND_S = 0.2  # between two looks of all ranks at whether all are done
_LEAVE_S = 10.0  # what a run that has failed still gives a save to end


class Checkpoints:
    """The checkpoints of one run directory. Every rank makes one, at the same time; drafts of killed runs go.

    keep       how many of the newest stay
    timeout_s  the longest that ranks wait for one that writes nothing any more
    """

    def __init__(self, folder: Path, keep: int, mesh: Any, timeout_s: float) -> None:
        self.folder, self._keep, self._mesh, self._timeout_s = Path(folder), keep, mesh, timeout_s
        token = None
        if mesh.rank == 0:
            for left in drafts(self.folder):
                shutil.rmtree(left, ignore_errors=True)
            token = secrets.token_hex(3)
        self._token = mesh.gather(token)[0]
        self._attempts = 0
        self._save: _Save | None = None
        self._room = Room()
        self._saved_step: int | None = None
        self._complaint: str | None = None

    def make_room(self, strategy: Any, optimizer: Any) -> None:
        """Take the memory for the copies of saves to come, beside the training. After a step, which makes the
        optimizer's state."""
        make_room(shares_of(strategy, optimizer), self._mesh.pp, self._room)

    def save(self, strategy: Any, optimizer: Any, step: int, progress: dict | None = None, wait: bool = False) -> Path:
        """Begin to write a checkpoint of ``step``, once the save before is done; every rank calls it.

        progress  plain values that the manifest keeps; "best_step" equal to ``step`` has ``best`` lead here
        wait      until it is on the disk
        returns   where it is, or will be: a save that fails in the background is told by ``complaint``
        raises    CheckpointError, on every rank, where ``wait`` and it could not be written; older ones are untouched
        """
        self.settle()
        final = self.folder / step_name(step)
        manifest = make_manifest(strategy, optimizer, step, progress or {})
        if step == self._saved_step:
            self._amend(final, manifest)
            return final
        self._attempts += 1
        draft = self.folder / draft_name(step, f"{self._token}-{self._attempts}")
        stages = len(strategy.plan.stages)
        work = (draft, final, manifest, stages, self._keep, self._timeout_s) if self._mesh.rank == 0 else None
        save = _Save(step, draft, shares_of(strategy, optimizer), work)
        if not wait:
            save.copy_or_write(self._mesh.pp, self._room)
            save.stands_back = True
        save.start()
        self._save = save
        if wait:
            error = self.settle()
            if error is not None:
                self._complaint = None
                raise CheckpointError(error)
        return final

    def settle(self) -> str | None:
        """Wait until every rank's part of the save under way is done; why it failed, the same on every rank."""
        save, error = self._save, None
        if save is None:
            return None
        while True:
            answers = self._mesh.gather(save.wait(_ROUND_S, self._timeout_s))
            if all(done for done, _ in answers):
                break
        error = next((problem for _, problem in answers if problem is not None), None)
        self._save = None
        if not save.done:
            self._room = Room()  # it was given up, and its thread may read the old one still
        if error is None:
            self._saved_step = save.step
            return None
        if self._mesh.rank == 0:
            shutil.rmtree(save.draft, ignore_errors=True)
        if not save.told:
            self._complaint = save.failed(error)
        return save.failed(error)

    def complaint(self) -> str | None:
        """Once for each save that has failed: why. For rank 0 to say at a step border; nobody waits for anybody."""
        save = self._save
        if save is not None and save.done and save.error is not None and not save.told:
            save.told = True
            return save.failed(save.error)
        said, self._complaint = self._complaint, None
        return said

    def resumed_from(self, path: Path) -> None:
        """The run has loaded ``path``: a save of the same step has nothing to add to it, if it is of this run."""
        if path.resolve().parent == self.folder.resolve():
            self._saved_step = int(path.resolve().name.partition("-")[2])

    def close(self) -> None:
        """Give a save that is under way time to end, on a rank that leaves early."""
        self._room.settle()
        if self._save is not None:
            self._save.join(_LEAVE_S)

    def _amend(self, final: Path, manifest: dict) -> None:
        """The weights are there; what is known of them may have grown by an evaluation since."""
        error = None
        if self._mesh.rank == 0:
            try:
                amend(final, manifest)
            except (OSError, CheckpointError) as failure:
                error = f"{failure}; {free_space(final)}"
        self._complaint = self._mesh.gather(error)[0]


class _Save(threading.Thread):
    """One checkpoint on its way to the disk: what this rank writes and, on rank 0, what makes it a whole."""

    def __init__(self, step: int, draft: Path, shares: list[Share], commit_work: tuple | None) -> None:
        super().__init__(name=f"checkpoint-{step}", daemon=True)
        self.step, self.draft, self.error, self.told = step, draft, None, False
        self._shares, self._commit_work = shares, commit_work
        self._size, self._grew = -1, time.monotonic()
        self.stands_back = False

    @property
    def done(self) -> bool:
        return not self.is_alive()

    def copy_or_write(self, writers: int, room: Room) -> None:
        """Copy the tensors, or write them at once where memory does not allow that. On return weights may change."""
        copies = copied(self._shares, writers, room)
        if copies is None:
            self._write()
        else:
            self._shares = copies

    def run(self) -> None:
        if self.stands_back:
            lower_priority()
        self._write()
        if self._commit_work is None:
            return
        try:
            if self.error is None:
                commit(*self._commit_work)
        except Exception as error:
            self.error = str(error)
            if not isinstance(error, CheckpointError):
                self.error += f"; {free_space(self.draft.parent)}"
        if self.error is not None:
            shutil.rmtree(self.draft, ignore_errors=True)

    def wait(self, seconds: float, timeout_s: float) -> tuple[bool, str | None]:
        """(done, error), after so many seconds at most. Given up where the draft has not grown for ``timeout_s``."""
        self.join(seconds)
        if self.done:
            return True, self.error
        size, now = size_of(self.draft), time.monotonic()
        if size != self._size:
            self._size, self._grew = size, now
        # Rank 0 looks for itself, and names the stage.
        if now - self._grew > timeout_s + _ROUND_S * 5:
            return True, f"nothing was written to {self.draft} for {timeout_s:g} s (parallel.timeout_s)"
        return False, None

    def failed(self, error: str) -> str:
        """``error`` of this save, in a sentence."""
        return f"the checkpoint of step {self.step} could not be written: {error}"

    def _write(self) -> None:
        while self._shares:
            self.error = write_share(self.draft, self._shares.pop(0)) or self.error
