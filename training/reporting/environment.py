"""The environment of a run: commit, machine, packages and command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from common.machine import usable_cores
from conf.masking import mask_secrets

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "wandb", "tiktoken", "safetensors", "numpy")
_GIT_NEEDS = ("PATH", "HOME", "XDG_CONFIG_HOME")


def describe(command: list[str] | None = None) -> dict[str, Any]:
    """Describe the commit, machine, packages and command of this run.

    Environment variables and the host's name are left out. Values that cannot be determined are None. Call this only
    in a process that may use GPUs, because it asks torch for them.

    ``command`` is the command line, ``sys.argv`` if None; its secrets are masked.
    """
    commit, dirty = git_state()
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {"model": _cpu_model(), "cores": usable_cores()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "command": mask_secrets(sys.argv if command is None else command),
    }


def git_state(tracked_file: str | Path = __file__) -> tuple[str | None, bool | None]:
    """Return the commit of this project's checkout, and whether files were changed. Both are None without a checkout.

    Git is asked about a file, because a copy of the project in another repository must not be taken for a checkout.
    """
    file = Path(tracked_file).resolve()
    folder = file.parent
    # Git must not get variables of a run's configuration (GIT_CONFIG_…, GIT_DIR), which could make it start a program.
    kept = {name: os.environ[name] for name in _GIT_NEEDS if name in os.environ}
    # Optional locks could make a simultaneous commit fail.
    git = partial(_run, "git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), env=kept)
    if git("ls-files", "--error-unmatch", file.name) is None:
        return None, None
    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def _run(*command: str, env: Mapping[str, str] | None = None) -> str | None:
    """Return a command's output; None if it fails, hangs or does not exist. ``env`` is its environment."""
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "errors": "replace", "timeout": 5.0}
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, env=env, **options).strip()
    return None


def _cpu_model() -> str | None:
    with suppress(OSError):
        if found := re.search(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(errors="replace"), re.MULTILINE):
            return found[1].strip()
    return _run("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or None


def _gpus() -> list[dict]:
    import torch

    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in properties]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
