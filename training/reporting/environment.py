"""What a run was made with: code, machine, packages and command line, without anything private."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "wandb", "tiktoken", "safetensors", "numpy")
MASK = "***"

_SECRET_NAME = re.compile(
    r"(api_?key|access_?key|private_?key|secret(_?key)?|token|password|passwd|credentials?)$", re.IGNORECASE)
# Keys as issuers write them: Hugging Face, OpenAI, GitHub, AWS, wandb (40 hex digits, or wandb_v1_…).
_SECRET_VALUE = re.compile(
    r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}|wandb_v\d_\w{16,}"
    r"|(?<![/\w])[0-9a-f]{40}(?![/\w]))")
_SHORTEST_SECRET = 8  # characters; anything shorter may be a word that a file has for other reasons
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]*:)[^/\s@]+@")
# `name=value`, `name: value` (inside {…}) and `--name=value`; a value ends where a list or mapping goes on.
_ASSIGNMENT = re.compile(
    r"(?P<name>[\w.\-]+)(?P<sign>\s*[=:]\s*)(?P<value>'[^']*'|\"[^\"]*\"|[^,{}\[\]\s'\"]+)")
# A vocabulary's `pad_token=0` is no secret.
_HARMLESS = re.compile(r"\d{1,6}|true|false|null|none|", re.IGNORECASE)


def describe(command: list[str] | None = None) -> dict:
    """The circumstances of this run as a JSON-ready dict; what cannot be found out is None.

    Holds git_commit and git_dirty of this project's checkout, python, platform, cpu (model, usable cores),
    memory_bytes, gpus (name and memory_bytes each), packages (versions) and command (`command`, or
    `sys.argv`) with secrets masked. Holds neither environment variables nor the host's name. Never raises.
    Asks torch for GPUs, so call it in a process that may use them.
    """
    commit, dirty = _git(Path(__file__).resolve())
    return {
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {"model": _cpu_model(), "cores": _usable_cores()},
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "packages": {name: _version(name) for name in PACKAGES},
        "command": mask_arguments(sys.argv if command is None else command),
    }


def mask_arguments(arguments: list[str]) -> list[str]:
    """A command line with each value replaced by `***` whose name or form is a secret's."""
    masked, hide_next = [], False
    for argument in arguments:
        masked.append(MASK if hide_next and not argument.startswith("-") else _mask_text(argument))
        hide_next = argument.startswith("--") and bool(_SECRET_NAME.search(argument.replace("-", "_")))
    return masked


def mask_secrets(value, name: str = ""):
    """A copy of a nested dict or list with `***` for secrets, known by key (`api_key`) or form (`hf_…`)."""
    if isinstance(value, dict):
        return {key: mask_secrets(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_secrets(item, name) for item in value]
    if _SECRET_NAME.search(name) and not _HARMLESS.fullmatch(str(value)):
        return MASK
    return _mask_text(value) if isinstance(value, str) else value


def _mask_text(text: str) -> str:
    def mask_assignment(match: re.Match) -> str:
        if _SECRET_NAME.search(match["name"].replace("-", "_")) and not _HARMLESS.fullmatch(match["value"]):
            return match["name"] + match["sign"] + MASK
        return match[0]

    for value in _secrets_of_environment():
        text = text.replace(value, MASK)
    text = _URL_PASSWORD.sub(rf"\1{MASK}@", text)
    text = _ASSIGNMENT.sub(mask_assignment, text)
    return _SECRET_VALUE.sub(MASK, text)


def _secrets_of_environment() -> list[str]:
    """Values that a configuration may have taken from the environment: ``${oc.env:WANDB_API_KEY}``."""
    named = (value for name, value in os.environ.items() if _SECRET_NAME.search(name))
    return [value for value in named if len(value) >= _SHORTEST_SECRET and not os.path.exists(value)]


def _git(tracked_file: Path) -> tuple[str | None, bool | None]:
    """Commit and dirty flag, both None where `tracked_file` belongs to no checkout.

    Asked about a file, not a folder: a copy of the project lying in another repository is no part of that.
    """
    folder = tracked_file.parent
    if _run("git", "-C", str(folder), "ls-files", "--error-unmatch", tracked_file.name) is None:
        return None, None
    commit = _run("git", "-C", str(folder), "rev-parse", "HEAD")
    # Without optional locks: recording a run must not get in the way of a commit being made.
    changes = _run("git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain")
    return commit, None if changes is None else bool(changes)


def _run(*command: str, timeout_s: float = 5.0) -> str | None:
    """A command's output without surrounding space, None where it fails, hangs or does not exist."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              errors="replace", timeout=timeout_s)
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


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


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
