"""Saving without stopping: the tensors are copied, a thread writes the copies, and training continues.

A save goes through these phases. A run that is killed in any of them leaves the older checkpoints as they were:

    copy_tensors      each writing rank copies its tensors; from here on training continues
    write_file        each file, or this rank's rows of it, flushed, into the draft .step-00000050.ATTEMPT.tmp
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
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import CheckpointError
from common.files import flush_path, free_space
from common.machine import available_memory
from parallel.host_group import BACKEND
from parallel.sharding import Rows, rows_of
from parallel.strategy import Strategy
from training.checkpoint.files import (
    BEST,
    FORMAT,
    LATEST,
    MANIFEST,
    Checkpoint,
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

Files = dict[str, dict[str, Rows]]  # this rank's rows of each tensor, by its name, by the name of its file


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
            warn: Takes a sentence about a save in the background that has failed.
        """
        self.folder, self.strategy, self.optimizer, self.warn = Path(folder), strategy, optimizer, warn
        self._every, self._keep, self._timeout_s, self._config = every, keep, timeout_s, config
        self._mesh = strategy.mesh
        if self._mesh.rank == 0:
            for draft in self.folder.glob(".*.tmp"):
                if draft.is_dir() and not draft.is_symlink():
                    shutil.rmtree(draft, ignore_errors=True)
        self._token, self._attempts = self._mesh.gather(secrets.token_hex(3))[0], 0
        self._group: dist.ProcessGroup | None = None
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
        path = None
        if self._every is not None and best:
            path = self.save(counted, progress(), wait=last)
        elif last and is_due(self._every, step, last):
            path = self.ensure_saved(counted, progress)
        elif counted != self._newest and is_due(self._every, step, last):
            path = self.save(counted, progress())
        save = self._pending
        if save is not None and not save.is_alive() and not save.lost:
            self._warn_of(save)
        return path

    def ensure_saved(self, counted: int, progress: Callable[[], dict]) -> Path | None:
        """Wait until the weights are on the disk. The arguments, results and errors are those of ``after_step``."""
        self.wait_pending()
        return None if counted == self._newest else self.save(counted, progress(), wait=True)

    def save(self, step: int, progress: dict | None = None, wait: bool = False) -> Path:
        """Start to write the checkpoint of a step; one that is written already gets the new progress.

        Raises:
            CheckpointError: With ``wait``, on every rank: it could not be written. Older ones are untouched.
        """
        self.wait_pending()
        self._newest = step
        final, manifest = self.folder / step_name(step), self._manifest(step, progress or {})
        if step == self._saved:
            if self._mesh.rank == 0:
                self._amend(final, manifest["progress"])
            return final
        files = files_of(self.strategy, self.optimizer)
        self._attempts += 1
        draft = self.folder / f".{step_name(step)}.{self._token}-{self._attempts}.tmp"
        copies = None if wait else copy_tensors(files, self._mesh.pp * self._mesh.shards, self._buffers)
        publish = partial(commit, draft, final, manifest, self._keep) if self._mesh.rank == 0 else None
        gather = partial(self._mesh.gather, group=self._connect(files))
        first = self._mesh.shard == 0
        self._pending = save = _Save(step, draft, copies or files, first, gather, publish, background=not wait)
        save.start()
        if wait:
            failure = self.wait_pending(warn=False)
            if failure is not None:
                raise CheckpointError(failure)
        elif copies is None:  # the originals may not change yet
            save.join()
        return final

    def wait_pending(self, warn: bool = True) -> str | None:
        """Wait until the pending save is done on every rank; return why it has failed, None if it has not."""
        save, self._pending = self._pending, None
        if save is None:
            return None
        save.join()
        answers = self._mesh.gather((save.error, save.lost))
        if any(lost for _, lost in answers):
            self._group = None  # it cannot be used any more
        save.error = next((error for error, _ in answers if error is not None), None)
        if save.error is None:
            self._saved = save.step
            return None
        self._newest = None
        if self._mesh.rank == 0:  # a rank that was late may have written to it again
            shutil.rmtree(save.draft, ignore_errors=True)
        if warn:
            self._warn_of(save)
        return save.failure()

    def resumed_from(self, checkpoint: Checkpoint) -> None:
        """Note that the run has loaded a checkpoint, so that it is not saved again."""
        self._newest = checkpoint.step
        if checkpoint.folder.parent == self.folder.resolve():
            self._saved = checkpoint.step

    def close(self) -> None:
        """Give a pending save some time to end, on a rank that leaves early. It does not wait for other ranks."""
        if self._pending is not None:
            self._pending.join(_CLOSE_S)

    def _manifest(self, step: int, progress: dict) -> dict[str, Any]:
        strategy = self.strategy
        plan = strategy.plan
        return {
            "format": FORMAT,
            "step": step,
            "seed": strategy.options.seed,
            "optimizer": self.optimizer.kind,
            "layout": {
                "parallel": plan.strategy,
                "dp": plan.dp,
                "pp": plan.pp,
                "shards": strategy.mesh.shards,
                "chunks": plan.chunks,
                "precision": plan.precision,
                "stages": [list(stage.layers) for stage in plan.stages],
            },
            "tied": dict(strategy.chain.tied),
            "loss_scale": {"scale": strategy.loss_scale.scale, "good_steps": strategy.loss_scale.good_steps},
            "progress": progress,
            "config": self._config,
        }

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

    def _connect(self, files: Files) -> dist.ProcessGroup | None:
        """Return the group of the saving threads, which is made when it is first needed."""
        if self._group is None and self._mesh.size > 1:
            most = max(self._mesh.gather(sum(rows.tensor.nbytes for part in files.values() for rows in part.values())))
            patience = timedelta(seconds=self._timeout_s + most / _SLOWEST_DISK)
            self._group = dist.new_group(backend="gloo", timeout=patience)
        return self._group

    def _warn_of(self, save: _Save) -> None:
        if save.error is not None and not save.reported:
            save.reported = True
            self.warn(f"{save.failure()}; training goes on, the last good checkpoint stays")


class _Save(threading.Thread):
    """One checkpoint on its way to the disk. The threads of all ranks go through the phases together.

    ``error`` is why it has failed, the same on every rank where none is lost; ``lost`` says whether a rank no longer
    answers, and ``reported`` whether the user knows of the error.
    """

    def __init__(
        self,
        step: int,
        draft: Path,
        files: Files,
        first: bool,
        gather: Callable[[Any], list],
        publish: Callable[[dict], None] | None,
        background: bool,
    ) -> None:
        """Take what this rank writes; ``publish`` is given a description of all files, and is None but on rank 0."""
        super().__init__(name=f"checkpoint-{step}", daemon=True)
        self.step, self.draft = step, draft
        self.error: str | None = None
        self.lost = self.reported = False
        self._files, self._first, self._background = files, first, background
        self._gather, self._publish = gather, publish

    def run(self) -> None:
        if self._background:
            lower_priority()
        try:
            layouts = self._together("written their files", self._write)
            described = self._together("read their files again", partial(self._describe, layouts))
            files = {name: entry for part in described for name, entry in sorted(part.items())}
            self._together("published it", partial(self._publish, files) if self._publish else lambda: None)
        except CheckpointError as error:
            self.error = str(error)
        if self.error is not None and self._publish:
            shutil.rmtree(self.draft, ignore_errors=True)

    def failure(self) -> str:
        """Return a sentence about this save's error."""
        return f"the checkpoint of step {self.step} could not be written: {self.error}"

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
            answers = self._gather((value, error))
        except Exception as failure:
            self.lost = True
            cause = str(failure).rpartition("] ")[2]  # without the line of gloo's source
            raise CheckpointError(f"it waited until all ranks had {done} (parallel.timeout_s): {cause}") from failure
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                raise CheckpointError(f"rank {rank}: {error}" if len(answers) > 1 else error)
        return [value for value, _ in answers]

    def _write(self) -> dict[str, str]:
        """Write this rank's rows; return each file's layout."""
        return {name: write_file(self.draft / name, rows, self._first) for name, rows in self._files.items()}

    def _describe(self, layouts: list[dict[str, str]]) -> dict[str, dict]:
        """Return size and sha256 of the files whose first writer this rank is."""
        for name in self._files if self._first else ():
            if len({theirs[name] for theirs in layouts if name in theirs}) > 1:
                raise CheckpointError(f"the ranks that share {name} have different tensors for it")
        return {name: describe(self.draft / name) for name in self._files if self._first}


def is_due(every: int | None, step: int, last: bool) -> bool:
    """Return whether something is due after a step: every N steps and after the last one, 0 for that only."""
    return every is not None and (last or (every > 0 and step % every == 0))


# -- the phases ------------------------------------------------------------------------------------------------------


def files_of(strategy: Strategy, optimizer: Optimizer) -> Files:
    """Return what this rank saves: its rows of its stages' tensors, if it belongs to the first copy of the model.

    A tied parameter is saved only by the stage that owns its canonical name.
    """
    if strategy.mesh.copy != 0:
        return {}
    tied, files = strategy.chain.tied, {}
    for index, stage in zip(strategy.indices, strategy.stages, strict=True):
        weights = {name: tensor for name, tensor in stage.layers.state_dict().items() if name not in tied}
        states = {
            f"{name}/{key}": value
            for name, parameter in stage.layers.named_parameters()
            if name not in tied
            for key, value in optimizer.state_of(parameter).items()
            if torch.is_tensor(value)
        }
        for kind, tensors in (("model", weights), ("optimizer", states)):
            if tensors:
                rows = {name: rows_of(tensor) for name, tensor in tensors.items()}
                files[f"{kind}-{index:02d}.safetensors"] = rows
    return files


@torch.no_grad()
def copy_tensors(files: Files, writers: int, buffers: dict[str, Tensor]) -> Files | None:
    """Copy the tensors, so that training may change the originals.

    On a GPU the copy stays on the device where it fits, which takes milliseconds; elsewhere it goes to main memory:
    into ``buffers``, by the tensors' names, for memory that is new to a process costs far more time than the copy.

    Returns:
        The copies, or None where memory does not suffice for as many as ``writers`` processes make at the same time.
    """
    tensors = {name: rows.tensor for part in files.values() for name, rows in part.items()}
    on_device = _devices_with_space(tensors.values(), writers)
    new = {n: t for n, t in tensors.items() if n not in buffers and t.device not in on_device}
    missing = sum(tensor.nbytes for tensor in new.values())
    if missing and missing * writers + RESERVE > available_memory():
        log.debug("too little memory to copy the tensors: the checkpoint is written before training continues")
        return None
    buffers |= {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in new.items()}
    copies = {n: t.clone() if t.device in on_device else buffers[n].copy_(t) for n, t in tensors.items()}
    for device in on_device:
        torch.cuda.synchronize(device)
    return {
        file: {name: rows._replace(tensor=copies[name]) for name, rows in part.items()} for file, part in files.items()
    }


def _devices_with_space(tensors: Iterable[Tensor], writers: int) -> set[torch.device]:
    """Return the GPUs that have space for another copy of their tensors while training continues."""
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            needed[tensor.device] = needed.get(tensor.device, 0) + tensor.nbytes
    sharing = writers if dist.is_initialized() and dist.get_backend() == BACKEND else 1
    return {device for device, size in needed.items() if _spare_memory(device, sharing) > size + RESERVE}


def _spare_memory(device: torch.device, sharing: int) -> int:
    """Return the bytes of a GPU that no step of this process has needed so far.

    What torch's allocator keeps beyond what is allocated now is no spare memory: the next step needs it. What is free
    on the device is shared by ``sharing`` processes.
    """
    unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] // sharing + unused


def commit(draft: Path, final: Path, manifest: dict, keep: int, files: dict[str, dict]) -> None:
    """Complete and publish a draft. Raises OSError; older checkpoints are untouched then."""
    write_manifest(draft / MANIFEST, {**manifest, "files": files})
    flush_path(draft)
    publish(draft, final)
    update_link(final.parent, LATEST, final.name)
    if manifest["progress"].get("best_step") == manifest["step"]:
        update_link(final.parent, BEST, final.name)
    remove_old(final.parent, keep)


def lower_priority() -> None:
    """Let the calling thread use the processor only when training does not, where threads have priorities."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
