"""From the arguments of a command line to a composed configuration, by Hydra."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from common.errors import UserError
from common.machine import check_working_directory
from conf import CHOSEN, FOLDER, OF_CHECKPOINT, ON_TOP, TRAINED, environment
from conf.instantiate import add_to_path, targets, why_foreign
from conf.messages import unknown_key
from conf.schema import Root, register
from conf.words import as_typed, code_folders, config_folder, expand_lists, is_override, options_first, typed_overrides
from launchers.world import launcher_start

_GROUPS = ("model", "data", "optim", "scheduler", "parallel", "launcher", "logger")
_LISTED = {"logger@loggers.": "logger", "callback@callbacks.": "callbacks"}  # groups of which several may be chosen
_FULL_ERROR = "HYDRA_FULL_ERROR"


class Refused(BaseException):
    """Carries an error out of a callback of Hydra, which would make a warning of an ``Exception`` and go on."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def compose_and_run(task: Callable[[Any, Any], None], arguments: Sequence[str]) -> None:
    """Compose the configuration, make the run directory and call ``task``; in a sweep, for each job.

    Args:
        task: Called with the configuration and Hydra's own section.
        arguments: The command line without the program's name.

    Raises:
        HydraException: Where the configuration cannot be composed.
        UserError: Where the working directory is gone, or Hydra's logging cannot be set up.
        SystemExit: After an answer of Hydra's own (--cfg job).
    """
    check_working_directory()
    folders = code_folders(arguments)
    # A rank that torchrun starts again finds the directory of the attempt before.
    start = launcher_start() or (time.time(), secrets.token_hex(3))
    _register_resolvers(*start)

    @hydra.main(version_base="1.3", config_path=str(FOLDER), config_name="train")
    def job(cfg: Any) -> Any:
        _register_resolvers(*start)  # a launcher of others (joblib) runs this in a process of its own
        hydra_section = HydraConfig.get()
        cfg.import_from = [*(cfg.import_from or ()), *folders]
        return task(_named(cfg, hydra_section.runtime.choices), hydra_section)

    argv, full_error = sys.argv, os.environ.get(_FULL_ERROR)
    words = [*_composable(expand_lists(arguments)), *_directory(arguments, *start)]
    sys.argv = [str(FOLDER.parent / "train.py"), *options_first(words)]
    os.environ[_FULL_ERROR] = "1"  # Hydra raises its errors then; otherwise it prints them in its own form
    GlobalHydra.instance().clear()
    try:
        job()
    except Refused as refused:
        raise refused.error from None
    finally:
        GlobalHydra.instance().clear()
        sys.argv = argv
        if full_error is None:
            del os.environ[_FULL_ERROR]


def _named(cfg: DictConfig, choices: Mapping[str, str | None]) -> DictConfig:
    """Give a model whose file does not say its name that of its option."""
    if OmegaConf.is_dict(cfg.model) and "_target_" in cfg.model and "name" not in cfg.model:
        name = choices.get("model") or str(cfg.model._target_).rpartition(".")[2]
        OmegaConf.update(cfg, "model.name", name, force_add=True)
    return cfg


def _register_resolvers(began: float, run_id: str) -> None:
    register()
    environment.register()
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)
    OmegaConf.register_new_resolver("began", lambda form: time.strftime(form, time.localtime(began)), replace=True)


def _directory(arguments: Sequence[str], began: float, run_id: str) -> list[str]:
    """The directory of a sweep under a launcher of others, whose processes know no resolvers before they begin."""
    foreign = any(word.startswith("hydra/launcher=") for word in arguments)
    if not foreign or any(word.startswith("hydra.sweep.dir=") for word in arguments):
        return []
    return [f"hydra.sweep.dir={time.strftime('multirun/%Y-%m-%d/%H-%M-%S', time.localtime(began))}-{run_id}"]


def with_schema(cfg: DictConfig) -> DictConfig:
    """Give a configuration that was composed before the types of its sections: ``train.steps=abc`` is an error."""
    return cfg if OmegaConf.get_type(cfg) is Root else OmegaConf.merge(OmegaConf.structured(Root), cfg)


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
        The option of each group, and "key=value" for each value that is not the one which these options bring. Of what
        a checkpoint brings, the model's name stands among the options, and what differs among the values. Of a
        configuration that was composed before (``--config-dir RUN/.hydra --config-name config``), what was typed.
    """
    if "model" not in choices:
        names = {group: cfg[group].name for group in ("model", "parallel", "launcher")}
        return names, as_typed(typed_overrides(HydraConfig.get()))
    chosen = {group: choices[group] for group in (*_GROUPS, *ON_TOP) if choices.get(group) is not None}
    loader = GlobalHydra.instance().config_loader()
    words = [f"{group}={option}" for group, option in chosen.items() if group not in ON_TOP]
    words.append(f"{OF_CHECKPOINT}={choices.get(OF_CHECKPOINT, 'none')}")
    for start, shown in _LISTED.items():
        further = {group: option for group, option in choices.items() if group.startswith(start)}
        words += [f"+{group}={option}" for group, option in further.items()]
        if further:
            names = [chosen[shown]] if shown in chosen else []
            chosen[shown] = f"[{','.join([*names, *further.values()])}]"
    defaults = dict(_leaves(loader.load_configuration("train", words, RunMode.RUN)))
    missing = object()
    changed = {key: value for key, value in _leaves(cfg) if defaults.get(key, missing) != value}
    if chosen["model"] == OF_CHECKPOINT:
        chosen["model"] = cfg.model.name
    chosen = {group: option for group, option in chosen.items() if option != OF_CHECKPOINT}
    return chosen, [f"{key}={_word(value)}" for key, value in changed.items()]


def composed_by(hydra: Any, cfg: Any) -> dict[str, Any]:
    """How a configuration was composed: the groups' options, the keys typed, and those derived from other values.

    Args:
        hydra: Hydra's own section.
        cfg: The configuration, with its references.
    """
    choices = OmegaConf.to_container(hydra.runtime.choices)
    keys = [re.split(r"[=@]", word.lstrip("+~"))[0] for word in typed_overrides(hydra)]
    tree = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    derived = [f"{name}.{key}" for name in TRAINED for key, value in tree[name].items() if "${" in str(value)]
    return {
        "choices": {group: choices.get(group) for group in (*CHOSEN, *ON_TOP)},
        "typed": [key for key in keys if key != OF_CHECKPOINT],
        "derived": derived,
    }


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
    for name in ("hydra", "import_from"):
        tree.pop(name, None)
    return walk(tree, "")


def _word(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def compose(overrides: Sequence[str], arguments: Sequence[str] = (), with_hydra: bool = False) -> Any:
    """Compose the configuration of a command line without running anything.

    Args:
        overrides: Its words.
        arguments: The whole command line, where it may name the user's own options (``--config-dir``).
        with_hydra: Whether to return Hydra's own section too, which holds the option of each group.

    Raises:
        HydraException: Where it cannot be composed.
    """
    register()
    environment.register()
    GlobalHydra.instance().clear()
    folder = config_folder(arguments)
    path = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    search = [] if folder is None else [f"hydra.searchpath=['file://{path}']"]
    with hydra.initialize_config_dir(str(FOLDER), version_base="1.3"):
        cfg = hydra.compose("train", [*expand_lists(overrides), *search], return_hydra_config=True)
    choices = cfg.hydra.runtime.choices
    if not with_hydra:
        with open_dict(cfg):
            del cfg.hydra
    return _named(cfg, choices)


def check_received(tree: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Check rank 0's configuration on another rank: it has come through a store that others may reach.

    Args:
        tree: The configuration, as plain data. Its ``import_from`` becomes this rank's own.
        arguments: What was typed here.

    Raises:
        UserError: It names code besides this project's and torch's that this rank's own command line does not name.
    """
    tree["import_from"] = code_folders(arguments)
    add_to_path(tree["import_from"])
    foreign = {target for target in targets(tree) if why_foreign(target) is not None}
    if foreign:
        own = OmegaConf.to_container(compose([word for word in arguments if is_override(word)], arguments))
        foreign -= set(targets(own))
    if foreign:
        raise UserError(
            f"rank 0 sends _target_={', '.join(sorted(foreign))}, which the command line of this rank does not name: "
            "give every machine the same command line"
        )


def _composable(arguments: Sequence[str]) -> list[str]:
    """What Hydra is given for a sweep over options, such as ``-m model=gpt2,transformer data.seq_len=64``.

    Hydra composes once without what is swept, and would refuse ``data.seq_len`` of the default model's data. As a sweep
    over one value it is left out there too.
    """
    if not {"-m", "--multirun"} & set(arguments):
        return list(arguments)
    try:
        parsed = {word: OverridesParser.create().parse_override(word) for word in arguments if "=" in word[1:]}
    except HydraException:
        return list(arguments)  # Hydra says what is wrong
    own = {word: override for word, override in parsed.items() if not word.startswith(("-", "hydra"))}
    if not any(override.is_sweep_override() and "." not in override.key_or_group for override in own.values()):
        return list(arguments)
    single = {
        word
        for word, o in own.items()
        if "." in o.key_or_group and not (o.is_sweep_override() or o.is_delete()) and o.value() is not None
    }
    return [_as_sweep(word) if word in single else word for word in arguments]


def _as_sweep(override: str) -> str:
    key, _, value = override.partition("=")
    return f"{key}=choice({value})" if value else override
