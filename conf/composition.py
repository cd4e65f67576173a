"""From the arguments of a command line to a composed configuration, by Hydra."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from common.errors import UserError
from common.machine import check_working_directory
from conf import FOLDER, environment, options
from conf.messages import unknown_key
from conf.schema import register
from launchers.world import launcher_start

_GROUPS = ("model", "data", "optim", "scheduler", "parallel", "launcher", "logger")
_ON_TOP = ("experiment", "debug")  # groups whose values are changes of the others' defaults
_FULL_ERROR = "HYDRA_FULL_ERROR"


def compose_and_run(task: Callable[[Any, Any], None], arguments: Sequence[str]) -> None:
    """Compose the configuration, make the run directory and call ``task``; in a sweep, for each job.

    Args:
        task: Called with the configuration and Hydra's own section.
        arguments: The command line without the program's name.

    Raises:
        HydraException: Where the configuration cannot be composed.
        UserError: For an argument that has Hydra read a pickle, and where its logging cannot be set up.
        SystemExit: After an answer of Hydra's own (--cfg job).
    """
    if rerun := [argument for argument in arguments if argument.startswith("--e")]:
        raise UserError(f"{rerun[0]} has Hydra read a pickle, which can run any code: repeat the run by its command")
    check_working_directory()
    register()
    environment.register()
    # A rank that torchrun starts again finds the directory of the attempt before.
    began, run_id = launcher_start() or (time.time(), secrets.token_hex(3))
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)
    OmegaConf.register_new_resolver("began", lambda form: time.strftime(form, time.localtime(began)), replace=True)

    @hydra.main(version_base="1.3", config_path=str(FOLDER), config_name="train")
    def job(cfg: Any) -> None:
        task(cfg, HydraConfig.get())

    argv, full_error = sys.argv, os.environ.get(_FULL_ERROR)
    sys.argv = [str(FOLDER.parent / "train.py"), *arguments]
    os.environ[_FULL_ERROR] = "1"  # Hydra raises its errors then; otherwise it prints them in its own form
    GlobalHydra.instance().clear()
    try:
        job()
    finally:
        GlobalHydra.instance().clear()
        sys.argv = argv
        if full_error is None:
            del os.environ[_FULL_ERROR]


def check_keys(cfg: DictConfig, path: str = "") -> DictConfig:
    """Check that a configuration has no key that its schemas do not know: ``+parallel.chnks=4`` adds one.

    Args:
        cfg: A composed configuration, or a section of it.
        path: Where the section is.

    Returns:
        ``cfg``.

    Raises:
        HydraException: Naming the key, and the nearest that exists.
    """
    known = getattr(OmegaConf.get_type(cfg), "__dataclass_fields__", None)
    for name in cfg:
        key = f"{path}.{name}" if path else str(name)
        if key == "hydra":  # its own section
            continue
        if known is not None and name not in known:
            raise ConfigCompositionException(unknown_key(key, list(known)))
        if not OmegaConf.is_missing(cfg, name) and not OmegaConf.is_interpolation(cfg, name):
            value = cfg[name]
            if isinstance(value, DictConfig):
                check_keys(value, key)
    return cfg


def differences(cfg: DictConfig, choices: Mapping[str, str | None]) -> tuple[dict[str, str], list[str]]:
    """What a composed configuration has that is not a default. To be called while Hydra runs a task.

    Args:
        cfg: The configuration.
        choices: The option of each group, as Hydra has them at run time.

    Returns:
        The option of each group, and "key=value" for each value that is not the one which these options bring. A model
        of a checkpoint stands as the option that it was trained with, and its values as differences from that.
    """
    chosen = {group: choices.get(group) for group in (*_GROUPS, *_ON_TOP)}
    if chosen["model"] not in options("model"):
        chosen = {group: option for group, option in chosen.items() if option in options(group)}
        chosen = {"model": cfg.model.name, **chosen}
    chosen = {group: option for group, option in chosen.items() if option is not None}
    loader = GlobalHydra.instance().config_loader()
    words = [f"{group}={option}" for group, option in chosen.items() if group not in _ON_TOP]
    defaults = dict(_leaves(loader.load_configuration("train", words, RunMode.RUN)))
    missing = object()
    changed = {key: value for key, value in _leaves(cfg) if defaults.get(key, missing) != value}
    return chosen, [f"{key}={_word(value)}" for key, value in changed.items()]


def _leaves(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    """The values by key. References stay as they were written: what follows from a change is not another change."""

    def walk(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            key = f"{path}{name}"
            if isinstance(value, dict) and value:
                yield from walk(value, f"{key}.")
            else:
                yield key, value

    tree = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    tree.pop("hydra", None)
    return walk(tree, "")


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
