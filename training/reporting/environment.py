"""What a run was made with: code, machine, packages and command line."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from common.errors import UserError
from common.files import read_yaml
from common.machine import usable_cores
from conf.instantiate import is_ours
from conf.words import as_typed
from training.reporting.masking import mask_secrets

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "wandb", "tiktoken", "safetensors", "numpy")
# What a checkpoint does not keep.
_WHERE = ("device", "parallel", "launcher", "logger", "loggers", "callbacks", "import_from")
_NAMED = re.compile(r"_target_\W+([\w.]+)")


def describe(command: list[str] | None = None) -> dict[str, Any]:
    """Describes the circumstances of this run.

    Holds neither environment variables nor the host's name. Asks torch for GPUs, so call it in a process that may
    use them.

    Args:
        command: The command line; ``sys.argv`` if None. Its secrets are masked.

    Returns:
        A JSON-ready dict of git_commit and git_dirty (of this project's checkout), python, platform, cpu (model,
        usable cores), memory_bytes, gpus (name and memory_bytes of each), packages (versions) and command. What
        cannot be determined is None.
    """
    commit, dirty = git_state()
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {"model": _cpu_model(), "cores": usable_cores()},
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "command": mask_secrets(as_typed(sys.argv if command is None else command)),
    }


def where_typed(run_dir: Path) -> list[str]:
    """Return what the user typed of what a checkpoint does not keep or may not name, by the run directory."""
    try:
        # Not resolved: a value may refer to a secret of the environment.
        typed = OmegaConf.to_container(read_yaml(run_dir / ".hydra" / "overrides.yaml"), resolve=False)
        sources = read_yaml(run_dir / ".hydra" / "hydra.yaml").hydra.runtime.config_sources
    except UserError:
        return []  # they are but a hint
    own = [f"--config-dir={source.path}" for source in sources if source.provider == "command-line"]
    return own + [word for word in as_typed(typed) if _is_where(word) or not all(map(is_ours, _NAMED.findall(word)))]


def _is_where(word: str) -> bool:
    return re.split(r"[.=]", word.lstrip("+~"))[0] in _WHERE


def git_state() -> tuple[str | None, bool | None]:
    """Returns the commit of this project's checkout, and whether it was changed; both None where there is none."""
    return _git(Path(__file__).resolve())


def _git(tracked_file: Path) -> tuple[str | None, bool | None]:
    """Returns the commit and the dirty flag, both None where no checkout tracks the file.

    Asked about a file, not a folder: a copy of the project inside another repository does not belong to that one.
    """
    folder = tracked_file.parent
    if _run("git", "-C", str(folder), "ls-files", "--error-unmatch", tracked_file.name) is None:
        return None, None
    commit = _run("git", "-C", str(folder), "rev-parse", "HEAD")
    # Without optional locks: recording a run must not get in the way of a commit being made.
    changes = _run("git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def _run(*command: str, timeout_s: float = 5.0) -> str | None:
    """Returns a command's output, or None where it fails, hangs or does not exist."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return _run("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _gpus() -> list[dict]:
    try:
        import torch

        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in properties]
    except (ImportError, RuntimeError, AssertionError):  # no torch, or a driver that does not answer
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
