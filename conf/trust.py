"""A configuration may come from anywhere: it chooses what this project does, and cannot have anything else executed.

Targets are checked where they are called (``conf.instantiate.resolve``). Here is what Hydra itself, or the environment
of processes, would execute. The exceptions are ``launcher.setup``, whose values are shell lines, options of
``launcher.sbatch`` such as containers, and ``allow`` and ``import_from``, which let targets be of other packages: they
count where the user has typed them, or where they are in this project's own ``conf/``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from common.errors import UserError
from common.files import expand_home
from conf import FOLDER
from conf.words import as_typed

_VARIABLES = (
    "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "HIP_", "ROCR_",
    "OMP_", "GOMP_", "KMP_", "MKL_",
)  # fmt: skip
_CODE = ("allow", "import_from")  # keys that name packages whose code targets may be, and where they are
# Options of sbatch that run nothing.
_SBATCH = set(
    "account begin clusters comment constraint contiguous core_spec cores_per_socket cpus_per_gpu cpus_per_task "
    "deadline dependency distribution exclude exclusive gpus gpus_per_node gpus_per_task gres gres_flags hint hold "
    "licenses mail_type mail_user mem mem_per_cpu mem_per_gpu network nice no_requeue nodelist oversubscribe partition "
    "priority qos requeue reservation sockets_per_node switches threads_per_core time_min tmp wckey".split()
)
_WORDS = re.compile(r"[,\[\]'\"\s]+")
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
            f"{key}: {str(name)!r} is not allowed, as {reason}. Set it in the environment in which the run is started"
        )


def typed_overrides(hydra: Any) -> list[str]:
    """Return what the user typed for a job, with its interpolations as they are: a value may be a secret, or missing.

    Args:
        hydra: Hydra's own section.
    """
    return as_typed(OmegaConf.to_container(hydra.overrides, resolve=False)["task"])


def check_job(cfg: Any, hydra: Any) -> None:
    """Check what a composed job would have executed besides this project.

    Args:
        cfg: The configuration.
        hydra: Hydra's own section.

    Raises:
        UserError: ``hydra.job.env_set`` is not allowed, or code is named (``launcher.setup``,
            ``launcher.sbatch``, ``allow``, ``import_from``) by a file that is not this project's.
    """
    check_variables("hydra.job.env_set", hydra.job.env_set)
    typed = [override.lstrip("+") for override in typed_overrides(hydra)]
    others = [s.path for s in hydra.runtime.config_sources if s.schema == "file" and s.path != str(FOLDER)]
    launcher = cfg.launcher if hasattr(cfg.launcher, "get") else {}  # what is no section is refused later
    sbatch = launcher.get("sbatch")
    sbatch = [
        key for key in (sbatch if isinstance(sbatch, Mapping) else ()) if str(key).replace("-", "_") not in _SBATCH
    ]
    named = {"launcher.setup": launcher.get("setup"), "launcher.sbatch": sbatch}
    named |= {key: cfg.get(key) for key in _CODE}
    for key, values in named.items():
        if others and values and not any(word.startswith(key) for word in typed):
            raise UserError(
                f"{key}={list(values)} has code executed, and may come from {', '.join(others)}: type it on the "
                "command line if you mean it"
            )


def check_received(tree: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Check what rank 0's configuration would have executed on another rank, by that rank's own command line.

    The configuration has come through a store that others may reach.

    Args:
        tree: The configuration, as plain data.
        arguments: What was typed here.

    Raises:
        UserError: ``allow`` or ``import_from`` has what was not typed here.
    """
    words = [argument.lstrip("+").partition("=") for argument in arguments]
    typed = {key: {w for k, _, value in words if k == key for w in _WORDS.split(value)} for key in _CODE}
    typed["import_from"] |= set(config_folders(arguments))
    for key in _CODE:
        if unknown := [str(name) for name in tree.get(key) or [] if str(name) not in typed[key]]:
            raise UserError(
                f"rank 0 sends {key}={unknown}, which has code executed and was not typed on this rank: give every "
                "machine the same command line"
            )


def config_folder(arguments: Sequence[str]) -> Path | None:
    """Return the folder of the user's own options, ``--config-dir``; None where there is none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    folder = parser.parse_known_args(list(arguments))[0].config_dir
    return None if folder is None else expand_home(folder).absolute()


def config_folders(arguments: Sequence[str]) -> list[str]:
    """Return where the targets of the user's own options are: the folder of ``--config-dir``, and the one it is in.

    Empty where ``allow=`` was not typed: no module may come from there then, neither one that torch would like to find.
    """
    folder = config_folder(arguments)
    if folder is None or not any(argument.lstrip("+").startswith("allow=") for argument in arguments):
        return []
    return [str(folder.parent), str(folder)]
