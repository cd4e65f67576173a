"""Saving without stopping: the tensors are copied, a thread writes the copies, and training continues.

A save goes through these phases. A run that is killed in any of them leaves the older checkpoints as they were:

    copy_tensors      each writing rank copies its tensors; from here on training continues
    write_file        each file, or this rank's pieces of it, flushed, into the draft .step-00000050.tmp
    describe          size and sha256 of the files, complete by now, by one of their writers each
    write_manifest    rank 0: manifest.json, with step, layout, size and sha256 of each file
    publish           the draft gets its name
    update_link       ``latest``, and ``best`` where it is
    remove_old        only now are older checkpoints removed

The saving threads of all ranks have a process group of their own. On it they tell each other after the files, after
their descriptions and after the publication what they have done or what went wrong, so that all end alike.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import CheckpointError, TrainingError
from common.files import flush_path, free_space
from common.machine import available_memory
from parallel.sharding import Piece, piece_of
from parallel.strategy import Strategy
from training.checkpoint.files import (
    BEST,
    LATEST,
    MANIFEST,
    Checkpoint,
    Content,
    describe,
    publish,
    read_manifest,
    remove_old,
    step_name,
    update_link,
    write_file,
    write_manifest,
)
from training.checkpoint.load import Optimizer

log = logging.getLogger("training")

RESERVE = 512 * 2**20  # bytes that a copy leaves free
_NICE = 10
_CLOSE_S = 10.0  # how long a run that has failed waits for a save to end
_SLOWEST_DISK = 10 * 2**20  # bytes per second, for the longest wait for another rank

Files = dict[str, dict[str, Piece]]  # this rank's piece of each tensor, by its name, by the name of its file


class Checkpointer:
    """The checkpoints of one run directory, and what of a run is saved when. All ranks call each method together."""

    def __init__(
        self,
        folder: Path,
        strategy: Strategy,
        optimizer: Optimizer,
        *,
        every: int | None = None,
        keep: int = 3,
        timeout_s: float = 300.0,
        config: dict | None = None,
        check: Callable[[], str | None] = lambda: None,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Remove the drafts of killed runs.

        Args:
            folder: The ``checkpoints`` folder, which may not exist yet.
            strategy: The model.
            optimizer: Its optimizer.
            every: N to save every N steps and after the last one, 0 after the last one only, None never.
            keep: How many of the newest checkpoints are kept.
            timeout_s: The longest wait for another rank, in seconds, beyond what its files may take.
            config: The run's configuration, which each checkpoint keeps.
            check: Called on every rank with each save; raises where the run may not go on, or returns a warning.
            warn: Takes a sentence about a save in the background that has failed, or what ``check`` returns.
        """
        self.folder, self.strategy, self.optimizer = Path(folder), strategy, optimizer
        self.check, self.warn = check, warn
        self._every, self.keep, self._timeout_s = every, keep, timeout_s
        self._mesh, plan = strategy.mesh, strategy.plan
        self.rank, self._alone = self._mesh.rank, self._mesh.size == 1
        self._writers = 1  # on this machine
        self._about = {
            "seed": strategy.options.seed,
            "optimizer": optimizer.kind,
            "layout": plan.manifest(),
            "tied": dict(strategy.chain.tied),
            "config": config,
        }
        if self.rank == 0:
            for draft in self.folder.glob(".*.tmp"):
                if draft.is_dir() and not draft.is_symlink():
                    shutil.rmtree(draft, ignore_errors=True)
        self.group: dist.ProcessGroup | None = None
        self._buffers: dict[str, Tensor] = {}
        self._pending: _Save | None = None
        self._newest: int | None = 0  # the step whose weights need no saving: saved, on their way, or the initial ones
        self._saved: int | None = None  # the step of the newest checkpoint in this folder

    def after_step(
        self, step: int, counted: int, progress: Callable[[], dict], last: bool = False, best: bool = False
    ) -> Path | None:
        """Save what is due after a step: every N steps, after the last one, and the best so far.

        Args:
            step: The step.
            counted: The last step whose update counted. It names the checkpoint; steps skipped since are done again.
            progress: Gives what the training loop keeps of itself, as plain values. If its "best_step" is ``counted``,
                the link ``best`` will lead to this checkpoint.
            last: Whether the run ends with this step.
            best: Whether these weights have just been evaluated as the best so far.

        Returns:
            The checkpoint that is being written; None if these weights need none, or have one.

        Raises:
            CheckpointError: On every rank: that of the last step could not be written. Older ones are untouched.
        """
        self._connect()  # now: at a last save the store may be gone, such as that of a torchrun that was killed
        if self._every is not None and best:
            return self.save(counted, progress(), wait=last)
        if not is_due(self._every, step, last):
            return None
        if last:
            return self.ensure_saved(counted, progress)
        return None if counted == self._newest else self.save(counted, progress())

    def ensure_saved(self, counted: int, progress: Callable[[], dict]) -> Path | None:
        """Wait until the weights are on the disk. The arguments, results and errors are those of ``after_step``."""
        self.wait_pending()
        return None if counted == self._newest else self.save(counted, progress(), wait=True)

    def save(self, step: int, progress: dict | None = None, wait: bool = False) -> Path:
        """Start to write the checkpoint of a step; one that is written already gets the new progress.

        Raises:
            CheckpointError: With ``wait``, on every rank: it could not be written. Older ones are untouched.
            TrainingError: On every rank: what ``check`` raises, once the checkpoint is written.
        """
        self.wait_pending()
        self._newest = step
        final, progress = self.folder / step_name(step), progress or {}
        if step == self._saved:
            if self.rank == 0:
                self._amend(final, progress)
            return final
        scale = self.strategy.loss_scale.state_dict()
        manifest = {"step": step, **self._about, "loss_scale": scale, "progress": progress}
        self._connect()
        files = files_of(self.strategy, self.optimizer)
        copies = None if wait else copy_tensors(files, self._writers, self._buffers)
        self._pending = _Save(self, manifest, copies or files, awaited=wait)
        self._pending.start()
        if wait:
            failure = self.wait_pending()
            if failure is not None:
                raise CheckpointError(failure)
        elif copies is None:  # the originals may not change yet
            self._pending.join()
        try:
            warning = self.check()
        except TrainingError:
            self.wait_pending()  # what was trained is not lost
            raise
        if warning is not None:
            self.warn(warning)
        return final

    def wait_pending(self) -> str | None:
        """Wait until the pending save is done on every rank; return why it has failed, None if it has not."""
        save, self._pending = self._pending, None
        if save is None:
            return None
        save.join()
        answers = self.gather((save.error, save.lost))
        if any(lost for _, lost in answers):
            self.group = None  # it cannot be used any more
            if self.rank == 0:  # a rank that was late may have written to it again
                shutil.rmtree(save.draft, ignore_errors=True)
        failure = next((error for error, _ in answers if error is not None), None)
        if failure is None:
            self._saved = save.step
        else:
            self._newest = None
        return failure

    def resumed_from(self, checkpoint: Checkpoint) -> bool:
        """Note that the run has loaded a checkpoint, so that it is not saved again; return whether it is its own."""
        own = self.gather(checkpoint.folder.parent == self.folder.resolve())[0]
        self._newest = checkpoint.step
        if own:
            self._saved = checkpoint.step
        return own

    def close(self) -> None:
        """Give a pending save some time to end, on a rank that leaves early. It does not wait for other ranks."""
        if self._pending is not None:
            self._pending.join(_CLOSE_S)

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list:
        """Return every rank's value, by rank."""
        return [value] if self._alone else self._mesh.gather(value, group=group)

    def _amend(self, final: Path, progress: dict) -> None:
        """Update the progress of a checkpoint that is saved already: an evaluation may have followed."""
        try:
            known = read_manifest(final / MANIFEST)
            if known.get("progress") != progress:
                write_manifest(final / MANIFEST, {**known, "progress": progress})
            if progress.get("best_step") == known["step"]:
                update_link(self.folder, BEST, final.name)
        except (OSError, CheckpointError) as error:
            self.warn(f"{final} could not be brought up to date: {error}; {free_space(final)}")

    def _connect(self) -> None:
        """Make the group of the saving threads, unless there is one."""
        if self._alone or self.group is not None:
            return
        files = files_of(self.strategy, self.optimizer).values()
        own = sum(piece.tensor.nbytes for part in files for piece in part.values())
        node = socket.gethostname()
        others = self.gather((node, own))
        self._writers = sum(where == node and size > 0 for where, size in others)
        patience = timedelta(seconds=self._timeout_s + max(size for _, size in others) / _SLOWEST_DISK)
        group = dist.new_group(backend="gloo", timeout=patience)
        assert isinstance(group, dist.ProcessGroup)  # of all ranks
        self.group = group


class _Save(threading.Thread):
    """One checkpoint on its way to the disk. The threads of all ranks go through the phases together.

    ``error`` says why it has failed, the same on every rank where none is lost; ``lost`` whether a rank no longer
    answers.
    """

    def __init__(self, checkpoints: Checkpointer, manifest: dict, files: Files, awaited: bool) -> None:
        """Take what this rank writes. An error is a warning, unless the run waits for this save and raises it."""
        super().__init__(name=f"checkpoint-{manifest['step']}", daemon=True)
        self.step: int = manifest["step"]
        self.draft = checkpoints.folder / f".{step_name(self.step)}.tmp"
        self.error: str | None = None
        self.lost = False
        self._checkpoints, self._manifest, self._files, self._awaited = checkpoints, manifest, files, awaited

    def run(self) -> None:
        if sys.platform == "linux":  # there, threads have priorities: training comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            written = self._together("written their files", self._write)
            files = self._together("read their files again", partial(self._describe, written))
            self._together("published it", partial(self._publish, files))
        except CheckpointError as error:
            self.error = f"the checkpoint of step {self.step} could not be written: {error}"
            if self._checkpoints.rank == 0:
                shutil.rmtree(self.draft, ignore_errors=True)
            if not self._awaited:
                self._checkpoints.warn(f"{self.error}; training goes on, the last good checkpoint stays")

    def _together(self, done: str, phase: Callable[[], Any]) -> list:
        """Do a phase and return what it gave on each rank.

        Raises:
            CheckpointError: On every rank: it has failed on one; or a rank does not answer.
        """
        value = error = None
        try:
            value = phase()
        except CheckpointError as failure:
            error = str(failure)
        except Exception as failure:
            error = f"{failure}; {free_space(self.draft.parent)}"
        try:
            answers = self._checkpoints.gather((value, error), group=self._checkpoints.group)
        except Exception as failure:
            self.lost = True
            cause = str(failure).rpartition("] ")[2]  # without the line of gloo's source
            raise CheckpointError(f"it waited until all ranks had {done} (parallel.timeout_s): {cause}") from failure
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                raise CheckpointError(f"rank {rank}: {error}" if len(answers) > 1 else error)
        return [value for value, _ in answers]

    def _write(self) -> dict[str, Content]:
        """Write this rank's pieces, and return what it has written of each file."""
        mesh = self._checkpoints.strategy.mesh
        return {name: write_file(self.draft / name, pieces, mesh) for name, pieces in self._files.items()}

    def _describe(self, written: list[dict[str, Content]]) -> dict[str, dict]:
        """Return size and sha256 of the files whose first writer this rank is, of which each rank has ``written``."""
        if not self._checkpoints.strategy.mesh.counts():
            return {}
        parts = {name: [Content(*part[name]) for part in written if name in part] for name in self._files}
        return {name: describe(self.draft / name, sum(own, Content())) for name, own in parts.items()}

    def _publish(self, described: list[dict[str, dict]]) -> None:
        """Complete the draft and give it its name, on rank 0. Older checkpoints are untouched if that fails.

        Raises:
            OSError: The disk is full, or cannot be written.
            CheckpointError: A rank's file is not there as that rank has described it.
        """
        if self._checkpoints.rank != 0:
            return
        files = {name: entry for part in described for name, entry in sorted(part.items())}
        for rank, part in enumerate(described):
            for name, entry in part.items():
                path = self.draft / name
                if not path.exists() or path.stat().st_size != entry["bytes"]:
                    raise CheckpointError(
                        f"{path} is not the file of {entry['bytes']} bytes that rank {rank} has written: the ranks do "
                        "not share the run directory"
                    )
        folder, final = self.draft.parent, self.draft.with_name(step_name(self.step))
        write_manifest(self.draft / MANIFEST, {**self._manifest, "files": files})
        flush_path(self.draft)
        publish(self.draft, final)
        update_link(folder, LATEST, final.name)
        best = self._manifest["progress"].get("best_step")
        if best == self.step:
            update_link(folder, BEST, final.name)
        remove_old(folder, self._checkpoints.keep, best)


def is_due(every: int | None, step: int, last: bool) -> bool:
    """Return whether something is due after a step: every N steps and after the last one, 0 for that only."""
    return every is not None and (last or (every > 0 and step % every == 0))


# -- what is saved ---------------------------------------------------------------------------------------------------


def files_of(strategy: Strategy, optimizer: Optimizer) -> Files:
    """Return the files that this rank writes a part of, with its pieces of its stages' tensors.

    A tied parameter is only where its canonical name is.
    """
    tied, unsaved, files = strategy.chain.tied, strategy.chain.unsaved, {}
    for index, stage in zip(strategy.indices, strategy.stages, strict=True):
        state = stage.layers.state_dict().items()
        weights = {name: tensor for name, tensor in state if name not in tied and name not in unsaved}
        states = {
            f"{name}/{key}": value
            for name, parameter in stage.layers.named_parameters()
            if name not in tied
            for key, value in optimizer.state_of(parameter).items()
            if torch.is_tensor(value)
        }
        for kind, tensors in (("model", weights), ("optimizer", states)):
            pieces = {name: piece_of(tensor) for name, tensor in tensors.items()}
            if any(piece.counts(strategy.mesh) for piece in pieces.values()):
                files[f"{kind}-{index:02d}.safetensors"] = pieces
    return files


@torch.no_grad()
def copy_tensors(files: Files, writers: int, buffers: dict[str, Tensor]) -> Files | None:
    """Copy the tensors to main memory, so that training may change the originals.

    The copies go into ``buffers``, by the tensors' names: memory that is new to a process costs far more time than the
    copy.

    Returns:
        The copies, or None where this machine's memory does not suffice for as many as its ``writers`` make at the same
        time.
    """
    tensors = {name: piece.tensor for part in files.values() for name, piece in part.items()}
    new = {name: tensor for name, tensor in tensors.items() if name not in buffers}
    missing = sum(tensor.nbytes for tensor in new.values())
    if missing and missing * writers + RESERVE > available_memory():
        log.debug("too little memory to copy the tensors: the checkpoint is written before training continues")
        return None
    buffers |= {name: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for name, t in new.items()}
    return {
        file: {name: piece._replace(tensor=buffers[name].copy_(piece.tensor)) for name, piece in part.items()}
        for file, part in files.items()
    }
