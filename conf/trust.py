"""A configuration may come from anywhere: it chooses what this project does, and cannot have anything else executed.

Targets are checked where they are called (``training.config.resolve``). Here is what Hydra itself, or the environment
of processes, would execute. The one exception is ``launcher.setup``, whose values are shell lines: they count where the
user has typed them, or where they are in this project's own ``conf/``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from common.errors import UserError
from conf import FOLDER

_VARIABLES = (
    "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "HIP_", "ROCR_",
    "OMP_", "GOMP_", "KMP_", "MKL_",
)  # fmt: skip
# Of these, some name a library that is loaded, or a place where files are read and written.
_FILES = re.compile(r"(PLUGIN|LIBRARIES|LIB|PATH|DIR|HOME|FILE|INJECTION\w*|CONF|CONFIG)$")


@dataclass(frozen=True)  # OmegaConf takes a frozen class for a section that nothing can change
class _Guard:
    _target_: str = "training.reporting.run_directory.RunDirectoryGuard"


@dataclass(frozen=True)
class _Report:
    _target_: str = "training.sweep.report.SweepReport"


@dataclass(frozen=True)
class _Callbacks:
    guard: _Guard = field(default_factory=_Guard)
    sweep: _Report = field(default_factory=_Report)


def _console(format: str) -> type:
    @dataclass(frozen=True)
    class Logging:
        version: int = 1
        formatters: dict[str, Any] = field(default_factory=lambda: {"simple": {"format": format}})
        handlers: dict[str, Any] = field(default_factory=lambda: {"console": dict(_HANDLER)})
        root: dict[str, Any] = field(default_factory=lambda: {"level": "INFO", "handlers": ["console"]})
        disable_existing_loggers: bool = False

    return Logging


_HANDLER = {"class": "logging.StreamHandler", "formatter": "simple", "stream": "ext://sys.stdout"}
_HydraLogging = _console("[%(asctime)s][HYDRA] %(message)s")
_JobLogging = _console("%(message)s")


@dataclass
class _Hydra(HydraConf):
    callbacks: _Callbacks = field(default_factory=_Callbacks)
    hydra_logging: _HydraLogging = field(default_factory=_HydraLogging)
    job_logging: _JobLogging = field(default_factory=_JobLogging)
    defaults: list[Any] = field(
        default_factory=lambda: [entry for entry in HydraConf().defaults if not _is_fixed(entry)]
    )


def _is_fixed(entry: Any) -> bool:
    return isinstance(entry, dict) and bool({"hydra_logging", "job_logging", "callbacks"} & set(entry))


def register() -> None:
    """Put the schema of Hydra's own section in place of Hydra's.

    The callbacks are this project's, and the log goes to the console: a handler of Python's logging can be any class,
    or write lines of any form into any file.
    """
    ConfigStore.instance().store(group="hydra", name="config", node=_Hydra, provider="conf")


def check_variables(key: str, variables: Mapping[str, Any]) -> None:
    """Check environment variables that a configuration sets.

    Args:
        key: The key that holds them, for the message.
        variables: Values by name.

    Raises:
        UserError: One is not a setting of torch or of the libraries that it computes and communicates with, or it
            names a file: libraries are loaded, and settings read, from such.
    """
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", str(name)) or not str(name).startswith(_VARIABLES):
            reason = f"it does not begin with one of {', '.join(_VARIABLES)}"
        elif _FILES.search(name) or "/" in str(value) or "\\" in str(value):
            reason = "it names a file or a folder, from which code may be loaded"
        elif not str(value).isprintable():
            reason = "its value holds a control character"
        else:
            continue
        raise UserError(
            f"{key}: {str(name)!r} is not allowed, as {reason}. Set it in the environment of the command: "
            "NAME=value python train.py …"
        )


def typed_overrides(hydra: Any) -> list[str]:
    """Return what the user typed for a job, with its interpolations as they are: a value may be a secret, or missing.

    Args:
        hydra: Hydra's own section.
    """
    return OmegaConf.to_container(hydra.overrides, resolve=False)["task"]


def check_job(cfg: Any, hydra: Any) -> None:
    """Check what a composed job would have executed besides this project.

    Args:
        cfg: The configuration.
        hydra: Hydra's own section.

    Raises:
        UserError: ``hydra.job.env_set`` is not allowed, or ``launcher.setup`` comes from a file that is not this
            project's.
    """
    check_variables("hydra.job.env_set", hydra.job.env_set)
    typed = any(override.lstrip("+").startswith("launcher.setup") for override in typed_overrides(hydra))
    others = [s.path for s in hydra.runtime.config_sources if s.schema == "file" and s.path != str(FOLDER)]
    if others and not typed and cfg.launcher.get("setup"):
        raise UserError(
            f"launcher.setup={list(cfg.launcher.setup)} are shell lines, and may come from {', '.join(others)}: type "
            "them on the command line if you mean them"
        )


def literal(node: Any) -> Any:
    """Return a copy of plain data in which OmegaConf takes no text for an interpolation."""
    if isinstance(node, dict):
        return {key: literal(item) for key, item in node.items()}
    if isinstance(node, list):
        return [literal(item) for item in node]
    return re.sub(r"(\\*)\$\{", r"\1\1\${", node) if isinstance(node, str) else node
