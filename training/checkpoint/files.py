"""A checkpoint on disk: the names, the tensor files, and the manifest, whose checksums verify every bit."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import operator
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import CheckpointError
from common.files import check_regular, expand_home, flush_path, write_atomically
from common.machine import usable_cores

if TYPE_CHECKING:
    from torch import Tensor

    from parallel.mesh import Mesh
    from parallel.pieces import Piece

MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
UNUSED = "unused-"
FORMAT = 2

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
_BLOCK = 2**20  # bytes
_STEP = re.compile(r"step-(\d{8,})")

log = logging.getLogger("training")


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint, such as step-00000050."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def step_folders(folder: Path) -> list[Path]:
    """Return the published checkpoints in a ``checkpoints`` folder, damaged ones included, oldest first."""
    named = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=step_of)


class Checkpoint:
    """A published checkpoint and the content of its manifest.

    Attributes:
        folder: Its path, with links resolved.
        step: The step after which it was saved.
        optimizer: The optimizer's class, by its full name.
        layout: The run's plan: parallel, dp, pp, chunks, precision, stages …
        tied: {alias: canonical} names of tied parameters.
        loss_scale: The loss scale of float16 after that step: scale and good_steps.
        average: The kind and the count of averaged weights; None if nothing is averaged.
        progress: The state that the training loop needs to continue.
        best_step: The step of the best evaluation so far; None before the first evaluation.
        config: The part of the run's configuration that a checkpoint keeps; None if it was saved without one.
        files: Size in bytes and sha256 of each file, by its name.
    """

    def __init__(self, folder: Path, verify: bool = False) -> None:
        """Read the manifest. With ``verify``, read every file and compare its checksum.

        Raises:
            CheckpointError: The manifest or a file is missing or damaged; the message names it.
        """
        path = folder / MANIFEST
        if not path.exists():
            raise CheckpointError(
                f"no checkpoint at {folder}: expected a folder with a {MANIFEST}, such as RUN_DIR/checkpoints/latest"
            )
        manifest = read_manifest(path)
        try:
            self.folder = folder.resolve()
            self.step, self.optimizer = operator.index(manifest["step"]), manifest["optimizer"]
            self.layout, self.loss_scale = dict(manifest["layout"]), manifest["loss_scale"]
            self.average = manifest.get("average")  # an older checkpoint has no such key
            self.progress, self.config, self.tied = manifest["progress"], manifest.get("config"), dict(manifest["tied"])
            best = self.progress.get("best_step")
            self.best_step = None if best is None else operator.index(best)
            described = manifest["files"].items()
            self.files = {_inside(name): (operator.index(e["bytes"]), str(e["sha256"])) for name, e in described}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        checks = [(folder / name, size, checksum if verify else None) for name, (size, checksum) in self.files.items()]
        with ThreadPoolExecutor(usable_cores()) as pool:
            for checked in [pool.submit(_check_file, *check) for check in checks]:
                checked.result()

    @classmethod
    def find(cls, path: Path, verify: bool = False) -> Checkpoint:
        """Return the checkpoint at a path.

        The path may be a checkpoint, a link to one, or a run directory or its ``checkpoints`` folder, which stand for
        their newest checkpoint. It may begin with ``~``. With ``verify``, every file is read and compared with its
        checksum.

        Raises:
            CheckpointError: It is missing or damaged. The message names the newest undamaged checkpoint in its folder.
        """
        folder = _named_by(expand_home(path))
        try:
            return cls(folder, verify)
        except CheckpointError as error:
            whole = cls.newest(folder.resolve().parent, verify=True)
            if whole is None:
                raise
            raise CheckpointError(f"{error}; the newest whole one there is {whole.folder}") from error

    @classmethod
    def newest(
        cls, folder: Path, verify: bool = False, warn: Callable[[str], None] = lambda line: None
    ) -> Checkpoint | None:
        """Return the newest undamaged checkpoint in a ``checkpoints`` folder; None if there is none.

        Args:
            folder: The folder.
            verify: Whether to compare the files' checksums, or only their sizes.
            warn: Called with a line about each newer checkpoint, which is damaged.
        """
        for candidate in reversed(step_folders(folder)):
            try:
                return cls(candidate, verify)
            except CheckpointError as error:
                warn(f"damaged checkpoint {candidate.name}: {error}")
        return None


def _inside(name: str) -> str:
    """Return ``name`` if it names a file in the checkpoint's folder; raise ValueError if it leads elsewhere."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name} is not the name of a file in its folder")
    return name


def _check_file(path: Path, size: int, checksum: str | None) -> None:
    try:
        check_regular(path)
        found = path.stat().st_size
        if found != size:
            raise CheckpointError(f"{path} has {found} bytes, the manifest says {size}: the checkpoint is damaged")
        if checksum is not None and (actual := sha256(path)) != checksum:
            raise CheckpointError(
                f"{path} is damaged: its sha256 is {actual[:12]}…, the manifest says {checksum[:12]}…"
            )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}: the checkpoint is damaged") from error


def _named_by(path: Path) -> Path:
    if (path / MANIFEST).exists():
        return path
    for folder, name in ((path, LATEST), (path / "checkpoints", LATEST), (path.parent, path.name)):
        if name in (LATEST, BEST) and (found := _current(folder, name)) is not None:
            return found
    return path


def _current(folder: Path, name: str) -> Path | None:
    """Return the checkpoint that ``latest`` or ``best`` stands for in a ``checkpoints`` folder; None if there is none.

    In a folder without links, the newest checkpoint is the latest, and its manifest names the best one.
    """
    if (folder / name).is_symlink() and (folder / name).is_dir():
        return folder / name
    newest = next(reversed(step_folders(folder)), None)
    if newest is None:
        return folder / name if (folder / name).is_dir() else None
    if name == LATEST:
        return newest
    best = Checkpoint(newest).best_step
    return folder / step_name(best) if best is not None else None


# -- the manifest ----------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> dict:
    """Return the content of a manifest.json, after comparing its checksum.

    Raises:
        CheckpointError: The file cannot be read, is damaged, or is not a manifest.
    """
    try:
        check_regular(path)
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a checkpoint in format {FORMAT}")
    if with_checksum(manifest)["sha256"] != manifest.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its content does not match its checksum")
    return manifest


def write_manifest(path: Path, manifest: dict) -> None:
    """Write a manifest.json with its checksum. Raises OSError."""
    write_atomically(path, json.dumps(with_checksum({**manifest, "format": FORMAT}), indent=1))


def with_checksum(manifest: dict) -> dict:
    """Return a copy of a manifest with the checksum of all its other entries."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return {**rest, "sha256": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def sha256(path: Path) -> str:
    """Return the checksum of a file's content, in hexadecimal."""
    digest = hashlib.sha256()  # not hashlib.file_digest, which Python 3.10 does not have
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


# -- the tensors ----------------------------------------------------------------------------------------------------


def write_file(path: Path, tensors: dict[str, Piece], mesh: Mesh) -> str | None:
    """Write a safetensors file, or this rank's pieces of it at their offsets, and flush it.

    The offset of each tensor follows from the names, dtypes and shapes alone, so that every rank knows the
    offset. A rank writes the pieces that it owns (``Mesh.owns``); the owner of uncut tensors also writes the header.

    Returns:
        The file's sha256 if this rank has written all of it, otherwise None.

    Raises:
        CheckpointError: A weight is not finite, so that training could not continue from this checkpoint.
    """
    for name, piece in tensors.items():
        if not is_usable(name, piece.tensor):
            raise CheckpointError(
                f"{name} is not finite: the run has diverged; try a lower optim.lr, or train.grad_clip=1.0"
            )
    header, starts = lay_out(tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The pieces of several ranks meet within a page. Linux's NFS client may send a page as a whole, with
    # zeros over the bytes of another machine, unless the file is opened for synchronous writes.
    divided = any(piece.axes for piece in tensors.values())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (getattr(os, "O_DSYNC", 0) if divided else 0), 0o666)
    out = _Output(descriptor, hashlib.sha256() if mesh.owns() and not divided else None)
    try:
        if mesh.owns():
            out.write(header, 0)
        for name in starts:
            piece = tensors[name]
            if mesh.owns(piece.axes):
                for numbers, box in piece.boxes():
                    content = bytes_of(numbers).numpy().reshape(*numbers.shape, numbers.itemsize)
                    _write_box(out, content, box, piece.shape, starts[name])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return None if out.digest is None else out.digest.hexdigest()


def bytes_of(numbers: Tensor) -> Tensor:
    """Return the bytes of a tensor, in main memory."""
    import torch  # late: reading a manifest does not need it

    return numbers.detach().cpu().contiguous().flatten().view(torch.uint8)


def is_usable(name: str, tensor: Tensor) -> bool:
    """Return whether training can continue from a tensor: a weight must be finite, or the -inf of an attention mask.

    The tensors of an optimizer, which have a slash in their names, may overflow.
    """
    if "/" in name or not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    least, largest = (tensor.float() if tensor.itemsize == 1 else tensor).aminmax()
    return not (least.isnan() or largest.isnan() or largest == math.inf)


def lay_out(tensors: dict[str, Piece]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and the offset of each tensor in bytes from the beginning of the file.

    Tensors follow each other without gaps. The widest dtypes come first, so that all tensors are aligned.
    """
    entries, end = {}, 0
    for name, piece in sorted(tensors.items(), key=lambda item: (-item[1].tensor.itemsize, item[0])):
        dtype = _DTYPES.get(str(piece.tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise TypeError(f"{name} is of {piece.tensor.dtype}, which a safetensors file cannot hold")
        start, end = end, end + math.prod(piece.shape) * piece.tensor.itemsize
        entries[name] = {"dtype": dtype, "shape": list(piece.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}


class _Output:
    """A file that is written at offsets. ``digest`` gets the bytes in the order in which they are written."""

    def __init__(self, descriptor: int, digest: Any) -> None:
        self._descriptor, self.digest = descriptor, digest

    def write(self, content: Any, offset: int) -> None:
        content = memoryview(content)
        while content:  # in blocks that a core's cache holds
            block = content[:_BLOCK]
            count = os.pwrite(self._descriptor, block, offset)
            if self.digest is not None:
                self.digest.update(block[:count])
            content, offset = content[count:], offset + count


def _write_box(out: _Output, content: Any, box: tuple[slice, ...], shape: tuple[int, ...], begin: int) -> None:
    """Write a box (an array of bytes) into a tensor that begins at offset ``begin``, one contiguous run at a time."""
    stride = math.prod(shape[1:]) * content.shape[-1]
    if all(place == slice(0, size) for place, size in zip(box[1:], shape[1:], strict=True)):
        out.write(content.reshape(-1), begin + (box[0].start * stride if box else 0))
    else:
        for index, part in zip(range(box[0].start, box[0].stop), content, strict=True):
            _write_box(out, part, box[1:], shape[1:], begin + index * stride)


# -- changes of the folder -------------------------------------------------------------------------------------------


def publish(draft: Path, final: Path) -> None:
    """Rename a draft to its final name. A damaged checkpoint of that name is removed first."""
    if final.exists():
        remove(final)
    os.replace(draft, final)
    flush_path(final.parent)


def update_link(folder: Path, name: str, target: str) -> None:
    """Make the relative link ``name`` point to ``target``, in one atomic step.

    ``Checkpoint.find`` also works without links: on a file system without links, this only warns, once.
    """
    link, place = folder / f".{name}.tmp", folder / name
    try:
        if place.is_dir() and not place.is_symlink():  # the folder was copied, and its links were followed
            log.warning("%s is a folder, not a link: it is kept as %s", place, set_aside(place).name)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        os.replace(link, place)
    except (OSError, NotImplementedError) as error:
        with suppress(OSError):
            place.unlink(missing_ok=True)  # it would point to an older checkpoint
        _tell_of_no_links(folder, getattr(error, "strerror", None) or str(error))
    flush_path(folder)


@lru_cache
def _tell_of_no_links(folder: Path, why: str) -> None:
    log.warning("%s has no links %s and %s (%s): its newest checkpoint is the latest, and names the best",
                folder, LATEST, BEST, why)  # fmt: skip


def remove_old(folder: Path, keep: int, best: int | None = None) -> None:
    """Remove all checkpoints except the newest ``keep`` and the checkpoint of step ``best``."""
    for old in step_folders(folder)[: -max(keep, 1)]:
        if step_of(old) != best:
            remove(old)


def set_aside(folder: Path) -> Path:
    """Rename a folder so that it no longer counts as a checkpoint of this run, and return its new path."""
    renamed = folder.with_name(UNUSED + folder.name)
    if renamed.exists():
        remove(renamed)
    os.replace(folder, renamed)
    return renamed


def remove(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed folder never counts as a checkpoint."""
    hidden = folder.with_name(f".{folder.name}.removed.tmp")
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
