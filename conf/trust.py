"""A configuration may come from anywhere: it chooses what this project does, and cannot have anything else executed.

Targets are checked where they are called (``training.config.resolve``). Here is what Hydra itself, or the environment
of processes, would execute. The one exception is ``launcher.setup``, whose values are shell lines: they count where the
user has typed them, or where they are in this project's own ``conf/``.
"""

from __future__ import annotations

import logging.config
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore

from common.errors import UserError
from conf import FOLDER

_VARIABLES = (
    "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "HIP_", "ROCR_",
    "OMP_", "GOMP_", "KMP_", "MKL_",
)  # fmt: skip
# Of these, some name a library that is loaded, or a place where files are read and written.
_FILES = re.compile(r"(PLUGIN|LIBRARIES|LIB|PATH|DIR|HOME|FILE|INJECTION\w*|CONF|CONFIG)$")
_LOGGING = ("logging.StreamHandler", "logging.NullHandler", "logging.Formatter", "sys.stdout", "sys.stderr")


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


@dataclass
class _Hydra(HydraConf):
    callbacks: _Callbacks = field(default_factory=_Callbacks)


def register() -> None:
    """Put the schema of Hydra's own section in place of Hydra's: the callbacks are this project's, and no others."""
    ConfigStore.instance().store(group="hydra", name="config", node=_Hydra, provider="conf")


class LoggingConfigurator(logging.config.DictConfigurator):
    """Sets logging up as ``hydra.job_logging`` and ``hydra.hydra_logging`` say, on the console only.

    A handler, a formatter or a filter can be any callable that Python can import, and a handler that writes to a file
    can write anything anywhere.
    """

    def resolve(self, name: str) -> Any:
        """Return what a dotted name stands for, where it is one of those that are allowed."""
        if name not in _LOGGING:
            raise ValueError(f"{name} is not allowed; there are {', '.join(_LOGGING)}")
        return super().resolve(name)

    def configure(self) -> None:
        """See the base class. Raises UserError where the configuration is refused or makes no sense."""
        try:
            super().configure()
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            raise UserError(
                f"hydra.job_logging or hydra.hydra_logging: {reason}. Leave them out; for a log, redirect the console"
            ) from None


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
    typed = any(override.lstrip("+").startswith("launcher.setup") for override in hydra.overrides.task)
    others = [s.path for s in hydra.runtime.config_sources if s.schema == "file" and s.path != str(FOLDER)]
    if others and not typed and cfg.launcher.get("setup"):
        raise UserError(
            f"launcher.setup={list(cfg.launcher.setup)} are shell lines, and may come from {', '.join(others)}: type "
            "them on the command line if you mean them"
        )
