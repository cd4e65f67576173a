"""Saves checkpoints in the background: the tensors are copied, a thread writes the copies, and training continues.

A save goes through these phases. A run that is killed in any of them leaves the older checkpoints as they were:

    copy_tensors      each writing rank copies its weights; training continues after that, and the optimizer's tensors
                      are copied before the next update
    write_file        each rank writes its files, or its pieces of them, into the draft .step-00000050.tmp, and flushes
    describe          each rank compares its tensors with the files that it shares; one rank computes sizes and sha256
    write_manifest    rank 0 writes manifest.json, with step, layout, size and sha256 of each file
    publish           the draft is renamed to its final name
    update_link       ``latest`` and ``best`` are updated; a best checkpoint in another directory is copied
    remove_old        older checkpoints are removed

The saving threads of all ranks have a separate process group. They exchange results and errors on it after the files
are written, after they are described and after the publication, so that a save succeeds or fails on all ranks.
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
from parallel.mesh import Mesh
from parallel.pieces import Piece
from parallel.strategy import Strategy
from training.checkpoint.files import (
    BEST,
    LATEST,
    MANIFEST,
    Checkpoint,
    bytes_of,
    lay_out,
    publish,
    read_manifest,
    remove_old,
    sha256,
    step_name,
    update_link,
    write_file,
    write_manifest,
)
from training.checkpoint.load import StoredTensor
from training.optimizer import Optimizer
from training.optimizer.average import TRAINED

log = logging.getLogger("training")

RESERVE = 512 * 2**20  # bytes that a copy leaves free
_NICE = 10
_CLOSE_S = 10.0  # seconds that a failed run waits for a save to end
_SLOWEST_DISK = 10 * 2**20  # bytes per second, for the longest wait for another rank

Files = dict[str, dict[str, Piece]]  # {file name: {tensor name: this rank's piece}}


class Checkpointer:
    """Saves the checkpoints of one run directory. All ranks call each method together."""

    def __init__(
        self,
        folder: Path,
        strategy: Strategy,
        optimizer: Optimizer,
        *,
        keep: int = 3,
        config: dict | None = None,
        check: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Remove the drafts of killed runs.

        Args:
            folder: The ``checkpoints`` folder, which may not exist yet.
            strategy: The model.
            optimizer: The model's optimizer.
            keep: The number of newest checkpoints to keep.
            config: The run's configuration, which each checkpoint keeps.
            check: Called on every rank at each save. It raises if the run may not continue, and may return a warning.
        """
        self.folder, self.strategy, self.optimizer = Path(folder), strategy, optimizer
        self.keep, self.check = keep, check
        self.warn: Callable[[str], None] = log.warning  # gets failed saves and warnings of ``check``
        self._mesh = strategy.mesh
        self.rank = self._mesh.rank
        self._writers = 1  # ranks on this machine that write
        self._about = {
            "seed": strategy.options.seed,
            "optimizer": optimizer.kind,
            "layout": strategy.plan.manifest(),
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
        self._newest: int | None = None  # the step of the newest checkpoint in this folder, saved or being saved
        self.origin = self.folder  # where the checkpoints of the resumed run are

    def save(self, step: int, progress: dict, wait: bool = False) -> Path | None:
        """Save the weights, unless they are the initial ones. If they are saved already, only the progress is updated.

        Args:
            step: The last step whose update was applied. It names the checkpoint; steps skipped since are repeated.
            progress: The state of the training loop, as plain values. If its "best_step" is ``step``, the link ``best``
                will point to this checkpoint.
            wait: Whether to wait until the weights are on disk.

        Returns:
            The path of the checkpoint that is being written; None if nothing is written.

        Raises:
            CheckpointError: With ``wait``, on every rank: the checkpoint was not written. Older ones are untouched.
            TrainingError: On every rank: the error of ``check``, after the checkpoint is written.
        """
        self.wait_pending()
        final = self.folder / step_name(step)
        if step == self._newest and self.rank == 0:
            self._amend(final, progress)
        if step in (0, self._newest):
            return None
        self._newest = step
        scale = self.strategy.loss_scale.state_dict()
        average = self.optimizer.average.state_dict()
        manifest = {"step": step, **self._about, "loss_scale": scale, "average": average, "progress": progress}
        self.connect()
        files = files_of(self.strategy, self.optimizer)
        copied = None if wait else copy_tensors(files, self._writers, self._buffers, later=not self.optimizer.has_modes)
        self._pending = _Save(self, manifest, *(copied or (files, [])), awaited=wait)
        self._pending.start()
        if wait:
            failure = self.wait_pending()
            if failure is not None:
                raise CheckpointError(failure)
        elif copied is None:  # the originals may not change yet
            self._pending.join()
        try:
            warning = self.check()
        except TrainingError:
            self.wait_pending()  # so that the trained weights are not lost
            raise
        if warning is not None:
            self.warn(warning)
        return final

    def wait_copied(self) -> None:
        """Wait until the pending save has copied the optimizer's tensors, which the next update changes."""
        if self._pending is not None:
            self._pending.copied.wait()

    def wait_pending(self) -> str | None:
        """Wait until the pending save is done on every rank; return its error, or None if it succeeded."""
        save, self._pending = self._pending, None
        if save is None:
            return None
        save.join()
        answers = self._mesh.gather((save.error, save.lost))
        if any(lost for _, lost in answers):
            self.group = None  # it cannot be used any more
            if self.rank == 0:  # a late rank may have written to the draft again
                shutil.rmtree(save.draft, ignore_errors=True)
        failure = next((error for error, _ in answers if error is not None), None)
        if failure is not None:
            self._newest = None
        return failure

    def resumed_from(self, checkpoint: Checkpoint) -> bool:
        """Record that the run has loaded a checkpoint. A checkpoint in this run's directory is not saved again.

        Returns whether the checkpoint is in this run's directory.
        """
        own = self._mesh.gather(checkpoint.folder.parent == self.folder.resolve())[0]
        if own:
            self._newest = checkpoint.step
        else:  # where train.resume=auto of this run does not look
            self.origin = checkpoint.folder.parent
        return own

    def has(self, step: int) -> bool:
        """Return whether rank 0 finds the checkpoint of a step, in this run's directory or in the resumed run's."""
        return self._mesh.gather((self.origin / step_name(step) / MANIFEST).exists())[0]

    def close(self) -> None:
        """Wait some seconds for a pending save, on a rank that leaves early. This does not wait for other ranks."""
        if self._pending is not None:
            self._pending.join(_CLOSE_S)

    def _amend(self, final: Path, progress: dict) -> None:
        """Update the progress in a saved checkpoint, because the model may have been evaluated since the save."""
        try:
            known = read_manifest(final / MANIFEST)
            if known.get("progress") != progress:
                write_manifest(final / MANIFEST, {**known, "progress": progress})
            if progress.get("best_step") == known["step"]:
                update_link(self.folder, BEST, final.name)
        except (OSError, CheckpointError) as error:
            self.warn(f"{final} could not be brought up to date: {error}; {free_space(final)}")

    def connect(self) -> None:
        """Make the process group of the saving threads if it does not exist yet."""
        if self._mesh.size == 1 or self.group is not None:
            return
        files = files_of(self.strategy, self.optimizer).values()
        own = sum(piece.tensor.nbytes for part in files for piece in part.values())
        node = socket.gethostname()
        others = self._mesh.gather((node, own))
        self._writers = sum(where == node and size > 0 for where, size in others)
        seconds = self.strategy.options.timeout_s + max(size for _, size in others) / _SLOWEST_DISK
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self.group = group


class _Save(threading.Thread):
    """A thread that writes one checkpoint. The threads of all ranks go through the phases together.

    Attributes:
        copied: Set when the optimizer's tensors are copied.
        error: The reason why the save has failed, the same on every rank unless a rank is lost; None if it has not.
        lost: Whether a rank no longer answers.
    """

    def __init__(
        self, checkpoints: Checkpointer, manifest: dict, files: Files, later: list[tuple[Tensor, Tensor]], awaited: bool
    ) -> None:
        """Store the files that this rank writes, and the copies with their originals that are not copied yet.

        An error is a warning or, if ``awaited``, is raised by the run.
        """
        super().__init__(name=f"checkpoint-{manifest['step']}", daemon=True)
        self.step: int = manifest["step"]
        self.draft = checkpoints.folder / f".{step_name(self.step)}.tmp"
        self.error: str | None = None
        self.lost = False
        self.copied = threading.Event()
        self._checkpoints, self._manifest, self._files, self._awaited = checkpoints, manifest, files, awaited
        self._later = later
        self._checksums: dict[str, str | None] = {}  # of the files that this rank alone writes

    def run(self) -> None:
        try:
            if sys.platform == "linux":  # where threads have priorities: training comes first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._together("written their files", self._write)
            files = self._together("read their files again", self._describe)
            self._together("published it", partial(self._publish, files))
        except CheckpointError as error:
            self.error = f"the checkpoint of step {self.step} could not be written: {error}"
            if self._checkpoints.rank == 0:
                shutil.rmtree(self.draft, ignore_errors=True)
            if not self._awaited:
                self._checkpoints.warn(f"{self.error}; training goes on, the last good checkpoint stays")
        finally:
            self.copied.set()  # the run waits for it

    def _together(self, done: str, phase: Callable[[], Any]) -> list:
        """Run a phase and return its results on all ranks.

        Raises:
            CheckpointError: On every rank: the phase failed on a rank, or a rank does not answer.
        """
        value = error = None
        try:
            value = phase()
        except CheckpointError as failure:
            error = str(failure)
        except Exception as failure:
            error = f"{failure}; {free_space(self.draft.parent)}"
        try:
            answers = self._checkpoints.strategy.mesh.gather((value, error), self._checkpoints.group)
        except Exception as failure:
            self.lost = True
            cause = str(failure).rpartition("] ")[2]  # without the line of gloo's source
            raise CheckpointError(f"it waited until all ranks had {done} (parallel.timeout_s): {cause}") from failure
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                raise CheckpointError(f"rank {rank}: {error}" if len(answers) > 1 else error)
        return [value for value, _ in answers]

    def _write(self) -> None:
        for copy, original in self._later:
            copy.copy_(original)
        self.copied.set()
        mesh = self._checkpoints.strategy.mesh
        self._checksums = {name: write_file(self.draft / name, p, mesh) for name, p in self._files.items()}

    def _describe(self) -> dict[str, dict]:
        """Return the sizes and sha256 of this rank's files if it is their first writer, otherwise {}."""
        mesh = self._checkpoints.strategy.mesh
        described = {
            name: describe(self.draft / name, pieces, mesh, self._checksums[name])
            for name, pieces in self._files.items()
        }
        return described if mesh.owns() else {}

    def _publish(self, described: list[dict[str, dict]]) -> None:
        """Complete the draft and rename it to its final name, on rank 0. If this fails, older checkpoints stay.

        Raises:
            OSError: The disk is full, or cannot be written.
            CheckpointError: A file is missing, or its size differs from the size that its rank has described.
        """
        if self._checkpoints.rank != 0:
            return
        files = {name: entry for part in described for name, entry in sorted(part.items())}
        for rank, part in enumerate(described):
            for name, entry in part.items():
                path, size = self.draft / name, entry["bytes"]
                if not path.exists() or path.stat().st_size != size:
                    raise CheckpointError(
                        f"{path} has not the {size} bytes of rank {rank}: the ranks do not share the run directory"
                    )
        folder, final = self.draft.parent, self.draft.with_name(step_name(self.step))
        write_manifest(self.draft / MANIFEST, {**self._manifest, "files": files})
        flush_path(self.draft)
        publish(self.draft, final)
        update_link(folder, LATEST, final.name)
        best = self._manifest["progress"].get("best_step")
        if best is None and (folder / BEST).is_symlink():
            (folder / BEST).unlink()  # it was the best by another metric or other data
        elif best is not None and (best == self.step or self._brought(folder, step_name(best))):
            update_link(folder, BEST, step_name(best))
        remove_old(folder, self._checkpoints.keep, best)

    def _brought(self, folder: Path, best: str) -> bool:
        """Copy the best checkpoint from the resumed run's directory unless it is here; return whether it was copied."""
        source, draft = self._checkpoints.origin / best, folder / f".{best}.tmp"
        if (folder / best).exists():
            return False
        try:
            shutil.copytree(source, draft)
            publish(draft, folder / best)
        except OSError as error:
            self._checkpoints.warn(f"the best checkpoint, {source}, could not be copied: {error}; {free_space(folder)}")
        return (folder / best).exists()


# -- what is saved ---------------------------------------------------------------------------------------------------


def files_of(strategy: Strategy, optimizer: Optimizer) -> Files:
    """Return the files that this rank writes, wholly or in part, with this rank's pieces of its stages' tensors.

    A tied parameter is only in the file that contains its canonical name.
    """
    tied, files = strategy.chain.tied, {}
    left_out = strategy.chain.unsaved.union(tied)
    for index, stage in zip(strategy.indices, strategy.stages, strict=True):
        state = stage.layers.state_dict().items()
        weights = {name: strategy.piece(name, tensor) for name, tensor in state if name not in left_out}
        states = {
            f"{name}/{key}": piece
            for name, parameter in stage.layers.named_parameters()
            if name not in tied
            for key, piece in optimizer.state_of(parameter).items()
        }
        states |= optimizer.average.pieces(stage)
        for kind, pieces in (("model", weights), ("optimizer", states)):
            if any(strategy.mesh.owns(piece.axes) for piece in pieces.values()):
                files[f"{kind}-{index:02d}.safetensors"] = pieces
    return files


def describe(path: Path, pieces: dict[str, Piece], mesh: Mesh, checksum: str | None = None) -> dict[str, Any]:
    """Compare a file with what this rank has written, and return its size and, on its first writer, its sha256.

    The file is not read if its ``checksum`` is known, because no other rank has written to it.

    Raises:
        CheckpointError: The file does not contain this rank's pieces.
    """
    from safetensors import SafetensorError, safe_open

    size = path.stat().st_size
    if checksum is not None:
        return {"sha256": checksum, "bytes": size}
    try:
        file = safe_open(path, framework="pt")
        own = {name: piece for name, piece in pieces.items() if mesh.owns(piece.axes)}
        same = all(bytes_of(p.read(StoredTensor(file, n))).equal(bytes_of(p.tensor)) for n, p in own.items())
    except SafetensorError:  # the file lacks its header or its end
        same = False
    if not same:
        raise CheckpointError(
            f"{path} of {size} bytes is not what its ranks have written: the file system lost a part of it, or the "
            "ranks do not share the run directory"
        )
    return {"sha256": sha256(path) if mesh.owns() else None, "bytes": size}


def check_savable(files: Files) -> None:
    """Check that checkpoint files can hold these tensors, before many steps are trained. Raises TrainingError."""
    for pieces in files.values():
        try:
            lay_out(pieces)
            for name, piece in pieces.items():
                if type(piece.tensor) not in (torch.Tensor, torch.nn.Parameter):
                    raise TypeError(f"{name} is a {type(piece.tensor).__name__}, which a safetensors file cannot hold")
        except TypeError as error:
            raise TrainingError(
                f"no checkpoint of this run can be written: {error}. Use another dtype or optimizer, or "
                "train.checkpoint_every=null"
            ) from None


@torch.no_grad()
def copy_tensors(
    files: Files, writers: int, buffers: dict[str, Tensor], later: bool
) -> tuple[Files, list[tuple[Tensor, Tensor]]] | None:
    """Copy the tensors to main memory, so that training may change the originals.

    The copies go into ``buffers`` by tensor name. These buffers are reused, because allocating new memory takes a
    process far more time than the copy.

    Args:
        files: This rank's pieces.
        writers: The number of ranks on this machine that make copies at the same time.
        buffers: The memory of earlier copies. Missing buffers are added.
        later: Whether the optimizer's tensors, which only updates change, are left to be copied by the caller.

    Returns:
        The copies, and pairs (copy, original) that are not copied yet; None if this machine has too little memory.
    """
    tensors = {name: piece.tensor for part in files.values() for name, piece in part.items()}
    new = {name: tensor for name, tensor in tensors.items() if name not in buffers}
    missing = sum(tensor.nbytes for tensor in new.values())
    if missing and missing * writers + RESERVE > available_memory():
        return None
    buffers |= {name: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for name, t in new.items()}
    of_optimizer = {name for name in tensors if "/" in name and not name.endswith(TRAINED)}
    left = {name for name in of_optimizer if later and tensors[name].device.type == "cpu"}  # others copy in their order
    for name, tensor in tensors.items():
        if name not in left:
            buffers[name].copy_(tensor)
    copies = {
        file: {name: piece._replace(tensor=buffers[name]) for name, piece in part.items()}
        for file, part in files.items()
    }
    return copies, [(buffers[name], tensors[name]) for name in left]
