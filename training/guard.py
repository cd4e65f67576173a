"""Keeps a new run from overwriting an old one or writing elsewhere, and a sweep from starting where it cannot run."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from common.files import explain
from launchers import World
from training.reporting.console import METRICS
from training.reporting.environment import mask_secrets


def refuse(message: str) -> NoReturn:
    """Leave with exit code 1. Hydra turns an exception of a callback into a warning; an exit it lets through."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)


class RunDirectoryGuard(Callback):
    """Looks at the run directory before Hydra writes its first file there, and through the files when they are
    written. (A sweep's is looked at job by job.)"""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.run.dir)
        if config.train.resume is None and (folder / METRICS).exists():
            refuse(f"{folder} holds another run; choose another hydra.run.dir, or go on with it by train.resume=auto")
        _stay_inside("hydra.output_subdir", config.hydra.output_subdir)
        problem = _why_not_writable(folder)
        if problem is not None:
            refuse(f"the run directory {folder} cannot be written: {problem}; choose another hydra.run.dir")

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        world = World.detect()
        if world is not None and world.size > 1 and world.origin in ("torchrun", "environment"):
            refuse("a sweep starts its jobs' processes itself: run it as python train.py -m …, without torchrun")
        _stay_inside("hydra.output_subdir", config.hydra.output_subdir)
        # Not resolved: it holds what only a job knows, its number.
        _stay_inside("hydra.sweep.subdir", OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"])

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.runtime.output_dir)
        mask_files([*folder.glob(f"{config.hydra.output_subdir}/*.yaml"), folder.parent / "multirun.yaml"])


def mask_files(paths: list[Path]) -> None:
    """Hide the secrets in YAML files that Hydra has written; files without any stay as they are."""
    for path in paths:
        try:
            found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            masked = mask_secrets(found)
            if masked != found:
                OmegaConf.save(OmegaConf.create(masked), path)
        except FileNotFoundError:
            continue
        except OSError as error:
            # A name and a key that cannot be hidden must not stay.
            path.unlink(missing_ok=True)
            print(f"warning: {path} could not be written again without its secrets: {error}", file=sys.stderr)


def _stay_inside(key: str, value: str | None) -> None:
    if value is not None and (Path(value).is_absolute() or ".." in Path(value).parts):
        refuse(f"{key}={value} leads out of the run directory; give a name without .. that does not begin with /")


def _why_not_writable(folder: Path) -> str | None:
    """What a first small file in ``folder``, or in the nearest folder above it that exists, meets with."""
    there = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".writable-") as file:
            file.write(b"\n" * 4096)
            file.flush()
    except OSError as error:
        return explain(error, there)
    return None
