"""Checkpoints: safetensors files keyed by global names, and a JSON manifest. Nothing is pickled.

    checkpoints/step-00000050/manifest.json
                              model-00.safetensors       parameters and buffers of stage 0
                              optimizer-00.safetensors   "<parameter>/<key>": exp_avg, …
    checkpoints/latest -> step-00000050

What one layout saved any other loads: a tied parameter stands once, under its canonical name, and each rank takes
what it needs out of whichever file has it. A checkpoint is written under a temporary name, flushed and renamed; then
``latest`` points to it, and only then is an older one removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.strategy import Strategy
from training.errors import CheckpointError
from training.optimizer import Optimizer

FORMAT = 1
MANIFEST = "manifest.json"


@dataclass
class Checkpoints:
    """The checkpoints of one run directory. ``keep``: how many of the newest stay."""

    folder: Path
    keep: int = 3

    def save(self, strategy: Strategy, optimizer: Optimizer, step: int) -> Path:
        """Write a checkpoint of ``step``; every rank calls it. Replica 0 writes, one pair of files a stage.

        Returns its path. Raises CheckpointError, on every rank, where a file could not be written; what was there
        before is untouched then.
        """
        final = self.folder / f"step-{step:08d}"
        draft = self.folder / f".step-{step:08d}.tmp"
        files, error = {}, None
        if strategy.mesh.replica == 0:
            try:
                files = _write_stages(draft, strategy, optimizer)
            except Exception as failure:
                error = _because(failure, self.folder)
        files, error = _gather(strategy, files, error)
        if error is None and strategy.mesh.rank == 0:
            try:
                self._commit(draft, final, _manifest(strategy, optimizer, step, files))
            except Exception as failure:
                error = _because(failure, self.folder)
        _, error = _gather(strategy, {}, error)
        if error is not None:
            if strategy.mesh.rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(f"the checkpoint of step {step} could not be written: {error}")
        return final

    def _commit(self, draft: Path, final: Path, manifest: dict) -> None:
        with open(draft / MANIFEST, "w") as file:
            json.dump(manifest, file, indent=1)
            _flush(file)
        _flush_folder(draft)
        if final.exists():
            shutil.rmtree(final)
        os.replace(draft, final)
        link = self.folder / ".latest.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        os.replace(link, self.folder / "latest")
        _flush_folder(self.folder)
        if self.keep > 0:
            for old in sorted(self.folder.glob("step-*"))[: -self.keep]:
                shutil.rmtree(old, ignore_errors=True)


def load(path: Path, strategy: Strategy, optimizer: Optimizer | None = None) -> int:
    """Take this rank's share of the checkpoint ``path`` (a step folder, or the link ``latest``); returns its step.

    optimizer  None: weights only (evaluation)
    raises     CheckpointError naming what is missing, damaged or of another shape
    """
    from safetensors import SafetensorError, safe_open

    manifest = read_manifest(path)
    # One rank reads everything once; the others only their share.
    damage = _first_damaged(path, manifest) if strategy.mesh.rank == 0 else None
    _, damage = _gather(strategy, {}, damage)
    if damage is not None:
        raise CheckpointError(damage)
    if optimizer is not None and manifest["optimizer"] != optimizer.kind:
        raise CheckpointError(
            f"{path} was saved with optim {manifest['optimizer']}, this run has {optimizer.kind}: go on with the same "
            "optimizer, or start anew"
        )
    index: dict[str, Path] = {}
    try:
        for name in manifest["files"]:
            with safe_open(path / name, framework="pt") as file:
                index.update(dict.fromkeys(file.keys(), path / name))

        def tensor(key: str) -> Tensor:
            with safe_open(index[key], framework="pt") as file:
                return file.get_tensor(key)

        strategy.load_state_dict(_Lazy(index, tensor))
        if optimizer is not None:
            states: dict[str, list[str]] = {}
            for key in index:
                name, slash, kind = key.partition("/")
                if slash:
                    states.setdefault(name, []).append(kind)
            for name, parameter in strategy.named_parameters():
                optimizer.load_state_of(parameter, {k: tensor(f"{name}/{k}") for k in states.get(name, [])})
            strategy.loss_scale.load_state_dict(manifest["loss_scale"])
    except KeyError as error:
        raise CheckpointError(f"{path} does not fit this model: {error.args[0]}") from error
    except (ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    return manifest["step"]


def read_manifest(path: Path) -> dict:
    """The manifest of a checkpoint. Raises CheckpointError where there is none or files of it are missing."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"no checkpoint at {path}: expected a folder with a {MANIFEST}, such as RUN_DIR/checkpoints/latest"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "files" not in manifest:
        raise CheckpointError(f"{path / MANIFEST} is not the manifest of a checkpoint in format {FORMAT}")
    for name, entry in manifest["files"].items():
        size = (path / name).stat().st_size if (path / name).exists() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{path / name} {found}, the manifest says {entry['bytes']}: the checkpoint is damaged"
            )
    return manifest


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a ``checkpoints`` folder whose files are all there; None without any."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        try:
            read_manifest(path)
            return path
        except CheckpointError:
            continue
    return None


def _first_damaged(path: Path, manifest: dict) -> str | None:
    """What is wrong with the first file whose content is not what was written; None where all are whole."""
    for name, entry in manifest["files"].items():
        try:
            with open(path / name, "rb") as file:
                found = _sha256(file)
        except OSError as error:
            return f"{path / name} cannot be read: {error}"
        if found != entry["sha256"]:
            return f"{path / name} is damaged: its sha256 is {found[:12]}…, the manifest says {entry['sha256'][:12]}…"
    return None


class _Lazy(dict):
    """Tensors by name, each read when it is asked for: a rank never holds another's share."""

    def __init__(self, index: dict[str, Path], read) -> None:
        super().__init__(index)
        self._read = read

    def __getitem__(self, key: str) -> Tensor:
        return self._read(key)


def _write_stages(draft: Path, strategy: Strategy, optimizer: Optimizer) -> dict[str, dict]:
    from safetensors.torch import save_file

    draft.mkdir(parents=True, exist_ok=True)
    written = {}
    tied = strategy.chain.tied
    for plan, stage in zip(strategy.plan.stages_of(strategy.mesh.position), strategy.stages, strict=True):
        weights = {k: v for k, v in stage.layers.state_dict().items() if k not in tied}
        states = {
            f"{name}/{key}": value
            for name, parameter in stage.layers.named_parameters()
            if name not in tied
            for key, value in optimizer.state_of(parameter).items()
            if torch.is_tensor(value)
        }
        for kind, tensors in (("model", weights), ("optimizer", states)):
            if not tensors:
                continue
            path = draft / f"{kind}-{plan.index:02d}.safetensors"
            save_file({k: v.contiguous() for k, v in tensors.items()}, path)
            with open(path, "rb+") as file:
                _flush(file)
                digest = _sha256(file)
            written[path.name] = {"sha256": digest, "bytes": path.stat().st_size}
    return written


def _sha256(file) -> str:
    digest = hashlib.sha256()  # Python 3.10 has no hashlib.file_digest
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _manifest(strategy: Strategy, optimizer: Optimizer, step: int, files: dict) -> dict:
    plan = strategy.plan
    return {
        "format": FORMAT,
        "step": step,
        "seed": strategy.options.seed,
        "optimizer": optimizer.kind,
        "layout": {
            "parallel": plan.strategy,
            "dp": plan.dp,
            "pp": plan.pp,
            "chunks": plan.chunks,
            "precision": plan.precision,
            "stages": [list(stage.layers) for stage in plan.stages],
        },
        "tied": dict(strategy.chain.tied),
        "loss_scale": strategy.loss_scale.state_dict(),
        "files": files,
    }


def _gather(strategy: Strategy, files: dict, error: str | None) -> tuple[dict, str | None]:
    """Everyone's files and the first error, on every rank."""
    if strategy.mesh.size == 1:
        return files, error
    answers: list = [None] * strategy.mesh.size
    dist.all_gather_object(answers, (files, error))
    merged = {name: entry for part, _ in answers for name, entry in part.items()}
    return dict(sorted(merged.items())), next((e for _, e in answers if e is not None), None)


def _because(error: Exception, folder: Path) -> str:
    try:
        free = f"; {shutil.disk_usage(folder).free / 2**20:,.0f} MiB are free at {folder}"
    except OSError:
        free = f" at {folder}"
    return f"{error}{free}"


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
