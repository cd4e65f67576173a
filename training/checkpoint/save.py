"""Saving without stopping: the tensors are copied, a thread writes the copies, and training continues."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import threading
import time
from functools import partial
from pathlib import Path

from common.errors import CheckpointError
from common.files import free_space
from parallel.mesh import Mesh
from parallel.strategy import Strategy
from training.checkpoint.commit import activity_in, amend, commit
from training.checkpoint.manifest import Optimizer, draft_name, drafts, make_manifest, step_name
from training.checkpoint.snapshot import StageFiles, StagingBuffers, copy_files, stage_files, write_stage

_NICE = 10
_POLL_S = 0.2  # after which all ranks ask each other again whether they are done
_CLOSE_S = 10.0  # how long a run that has failed waits for a save to end


class Checkpoints:
    """The checkpoints of one run directory. Every rank makes one, at the same time.

    Attributes:
        folder: The ``checkpoints`` folder.
    """

    def __init__(self, folder: Path, keep: int, mesh: Mesh, timeout_s: float, config: dict | None = None) -> None:
        """Removes the drafts of killed runs.

        Args:
            folder: The ``checkpoints`` folder, which may not exist yet.
            keep: How many of the newest checkpoints are kept.
            mesh: The ranks.
            timeout_s: The longest wait, in seconds, for a rank that writes nothing any more.
            config: The run's configuration, which each checkpoint keeps.
        """
        self.folder, self._keep, self._mesh, self._timeout_s = Path(folder), keep, mesh, timeout_s
        self._config = config
        token = None
        if mesh.rank == 0:
            for draft in drafts(self.folder):
                shutil.rmtree(draft, ignore_errors=True)
            token = secrets.token_hex(3)
        self._token = mesh.gather(token)[0]
        self._attempts = 0
        self._pending: _Save | None = None
        self._buffers = StagingBuffers()
        self._saved_step: int | None = None
        self._failure: str | None = None  # of a save that has ended, not reported yet

    def save(
        self,
        strategy: Strategy,
        optimizer: Optimizer,
        step: int,
        progress: dict | None = None,
        wait: bool = False,
    ) -> Path:
        """Starts to write a checkpoint, once the save before is done. Every rank calls it.

        Args:
            strategy: The model.
            optimizer: Its optimizer.
            step: The step that was done last.
            progress: Plain values that the manifest keeps. If its "best_step" is ``step``, the link ``best`` will
                lead to this checkpoint.
            wait: Whether to wait until the checkpoint is on the disk.

        Returns:
            Where it is, or will be. ``take_failure`` tells of a save that fails in the background.

        Raises:
            CheckpointError: With ``wait``, on every rank: it could not be written. Older checkpoints are untouched.
        """
        self.wait_pending()
        final = self.folder / step_name(step)
        manifest = make_manifest(strategy, optimizer, step, progress or {}, self._config)
        if step == self._saved_step:
            self._amend(final, manifest)
            return final
        self._attempts += 1
        draft = self.folder / draft_name(step, f"{self._token}-{self._attempts}")
        publish = None
        if self._mesh.rank == 0:
            stages = len(strategy.plan.stages)
            publish = partial(commit, draft, final, manifest, stages, self._keep, self._timeout_s)
        save = _Save(
            step, draft, stage_files(strategy, optimizer), publish, in_background=not wait, timeout_s=self._timeout_s
        )
        if not wait:
            save.copy_or_write(self._mesh.pp * self._mesh.shards, self._buffers)
        save.start()
        self._pending = save
        if wait:
            error = self.wait_pending()
            if error is not None:
                self._failure = None
                raise CheckpointError(error)
        return final

    def wait_pending(self) -> str | None:
        """Waits until every rank's part of the pending save is done.

        Returns:
            Why the save has failed, the same on every rank; None if it has not.
        """
        save, error = self._pending, None
        if save is None:
            return None
        while True:
            answers = self._mesh.gather(save.wait(_POLL_S, self._timeout_s))
            if all(done for done, _ in answers):
                break
        error = next((problem for _, problem in answers if problem is not None), None)
        self._pending = None
        if not save.done:
            self._buffers = StagingBuffers()  # the save was given up, and its thread may still read the old ones
        if error is None:
            self._saved_step = save.step
            return None
        if self._mesh.rank == 0:
            shutil.rmtree(save.draft, ignore_errors=True)
        if not save.reported:
            self._failure = save.failure(error)
        return save.failure(error)

    def take_failure(self) -> str | None:
        """Returns why a save in the background has failed, once for each; ranks do not wait for each other here."""
        save = self._pending
        if save is not None and save.done and save.error is not None and not save.reported:
            save.reported = True
            return save.failure(save.error)
        failure, self._failure = self._failure, None
        return failure

    def resumed_from(self, path: Path) -> None:
        """Notes that the run has loaded ``path``, so that it is not saved again if it is one of this run's own."""
        if path.resolve().parent == self.folder.resolve():
            self._saved_step = int(path.resolve().name.partition("-")[2])

    def close(self) -> None:
        """Gives a pending save some time to end, on a rank that leaves early."""
        if self._pending is not None:
            self._pending.join(_CLOSE_S)

    def _amend(self, final: Path, manifest: dict) -> None:
        """Updates the progress of a checkpoint that is saved already: an evaluation may have followed."""
        error = None
        if self._mesh.rank == 0:
            try:
                amend(final, manifest)
            except (OSError, CheckpointError) as failure:
                error = f"{failure}; {free_space(final)}"
        self._failure = self._mesh.gather(error)[0]


class _Save(threading.Thread):
    """One checkpoint on its way to the disk: what this rank writes and, on rank 0, the publication."""

    def __init__(
        self,
        step: int,
        draft: Path,
        stages: list[StageFiles],
        publish: partial | None,
        in_background: bool,
        timeout_s: float,
    ) -> None:
        super().__init__(name=f"checkpoint-{step}", daemon=True)
        self.step, self.draft = step, draft
        self.error: str | None = None
        self.reported = False
        self._stages, self._publish, self._in_background = stages, publish, in_background
        self._timeout_s = timeout_s
        self._seen, self._changed_at = -1, time.monotonic()

    @property
    def done(self) -> bool:
        return not self.is_alive()

    def copy_or_write(self, writers: int, buffers: StagingBuffers) -> None:
        """Copies the tensors, or writes them now where memory does not suffice. Then the originals may change."""
        copies = copy_files(self._stages, writers, buffers)
        if copies is None:
            self._write()
        else:
            self._stages = copies

    def run(self) -> None:
        if self._in_background:
            lower_priority()
        self._write()
        if self._publish is None:
            return
        try:
            if self.error is None:
                self._publish()
        except Exception as error:
            self.error = str(error)
            if not isinstance(error, CheckpointError):
                self.error += f"; {free_space(self.draft.parent)}"
        if self.error is not None:
            shutil.rmtree(self.draft, ignore_errors=True)

    def wait(self, seconds: float, timeout_s: float) -> tuple[bool, str | None]:
        """Waits for some seconds at most and returns (done, error).

        The save is given up if the draft has not grown for ``timeout_s`` seconds.
        """
        self.join(seconds)
        if self.done:
            return True, self.error
        seen, now = activity_in(self.draft), time.monotonic()
        if seen != self._seen:
            self._seen, self._changed_at = seen, now
        # A little later than rank 0, which watches the draft too and can name the stage.
        if now - self._changed_at > timeout_s + _POLL_S * 5:
            return True, f"nothing was written to {self.draft} for {timeout_s:g} s (parallel.timeout_s)"
        return False, None

    def failure(self, error: str) -> str:
        """Returns a sentence about this save's error."""
        return f"the checkpoint of step {self.step} could not be written: {error}"

    def _write(self) -> None:
        while self._stages:
            self.error = write_stage(self.draft, self._stages.pop(0), self._timeout_s) or self.error


def lower_priority() -> None:
    """Has the calling thread use the processor when training does not, where threads have their own priorities."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
