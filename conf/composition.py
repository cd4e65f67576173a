"""From the arguments of a command line to a composed configuration, by Hydra."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from common.errors import UserError
from common.machine import changed_environment, check_working_directory
from conf import (
    CHOSEN,
    FOLDER,
    GROUPS,
    ON_TOP,
    TRAINED,
    code_folders,
    config_folder,
    expand_lists,
    is_override,
    key_of,
    masking,
    typed_overrides,
)
from conf.instantiate import add_to_path, targets, why_foreign
from conf.messages import unknown_key
from conf.schema import Root, register
from launchers.world import launcher_start

_LISTED = {"logger@loggers.": "logger", "callback@callbacks.": "callbacks"}  # groups of which several may be chosen


class Refused(BaseException):
    """Carries an error out of a callback of Hydra, which would turn an ``Exception`` into a warning and go on."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def compose_and_run(task: Callable[[Any, Any], None], arguments: Sequence[str], brought: Sequence[str] = ()) -> None:
    """Compose the configuration, make the run directory and call ``task``; in a sweep, for each job.

    Args:
        task: Called with the configuration and Hydra's own section.
        arguments: The command line without the program's name.
        brought: Options of groups that were not typed, such as those of a checkpoint.

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

    def job(cfg: Any) -> Any:
        _register_resolvers(*start)  # a launcher of others (joblib) runs this in a process of its own
        hydra_section = HydraConfig.get()
        cfg.import_from = [*(cfg.import_from or ()), *folders]
        return task(_named(cfg, hydra_section.runtime.choices), hydra_section)

    parser = get_args_parser()
    parsed = parser.parse_intermixed_args(arguments)
    typed = expand_lists(parsed.overrides)
    words = _for_jobs(typed) if parsed.multirun else typed
    parsed.overrides = [*brought, *words, *_directory(typed, *start)]
    hydra.version.setbase("1.3")
    GlobalHydra.instance().clear()
    before, sys.argv = sys.argv, [str(FOLDER.parent / "train.py"), *arguments]  # what is recorded as the command
    try:
        with changed_environment({"HYDRA_FULL_ERROR": "1"}):  # Hydra raises its errors then, and prints none
            _run_hydra(parsed, parser, job, str(FOLDER), "train")
    except Refused as refused:
        raise refused.error from None
    finally:
        sys.argv = before


def _named(cfg: DictConfig, choices: Mapping[str, str | None]) -> DictConfig:
    """Give a model whose file does not say its name that of its option."""
    if OmegaConf.is_dict(cfg.model) and "_target_" in cfg.model and "name" not in cfg.model:
        name = choices.get("model") or str(cfg.model._target_).rpartition(".")[2]
        OmegaConf.update(cfg, "model.name", name, force_add=True)
    return cfg


def _register_resolvers(began: float, run_id: str) -> None:
    register()
    masking.register()
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
    """Return the section ``cfg`` at ``path`` if its schemas know all of its keys: ``+parallel.chnks=4`` adds one.

    Raises:
        HydraException: They do not. The message names the key, and the nearest that exists.
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


def differences(cfg: DictConfig, hydra: Any) -> tuple[dict[str, str], list[str]]:
    """Return what a configuration has besides the defaults of its options: what was typed, and what experiments set.

    It is the option of each group, and "key=value" for each value. What was taken from the environment is shown as it
    was written.
    """
    choices, typed = hydra.runtime.choices, typed_overrides(hydra)
    if "model" not in choices:  # composed before: --config-dir RUN/.hydra --config-name config
        return {group: cfg[group].name for group in ("model", "parallel", "launcher")}, typed
    chosen = {group: choices[group] for group in (*GROUPS, *ON_TOP) if choices.get(group) is not None}
    chosen["model"] = cfg.model.name
    for start, shown in _LISTED.items():
        if further := [option for group, option in choices.items() if group.startswith(start)]:
            chosen[shown] = f"[{','.join([*([chosen[shown]] if shown in chosen else []), *further])}]"
    tree = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    words = {key_of(word): word.lstrip("+") for word in typed}
    keys = {key: word for key, word in words.items() if key not in chosen and not key.startswith("hydra")}
    for source in hydra.runtime.config_sources if any(key in chosen for key in ON_TOP) else ():
        for group in ON_TOP:
            file = Path(source.path, group, f"{chosen.get(group)}.yaml")
            if source.schema == "file" and file.is_file():
                set_there = leaves(OmegaConf.to_container(OmegaConf.load(file), resolve=False))
                keys = {key: "" for key in set_there if key not in keys} | keys
    return chosen, [_change(tree, key, word) for key, word in keys.items()]


def _change(tree: Any, key: str, word: str) -> str:
    """Return "key=value" as the configuration has it; as it was typed where that is a mapping or gone."""
    for name in key.split("."):
        tree = tree.get(name, word) if isinstance(tree, dict) else word
    return word if tree is word or isinstance(tree, dict) else f"{key}={_word(tree)}"


def leaves(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of a file by dotted key, without its defaults list; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{path}{name}.")
        elif f"{path}{name}" != "defaults":
            found[f"{path}{name}"] = value
    return found


def composed_by(hydra: Any, cfg: Any) -> dict[str, Any]:
    """Return how a configuration was composed: options of groups, keys typed, and keys derived from other values."""
    choices = OmegaConf.to_container(hydra.runtime.choices)
    tree = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    derived = [f"{name}.{key}" for name in TRAINED for key, value in tree[name].items() if "${" in str(value)]
    return {
        "choices": {group: choices.get(group) for group in (*CHOSEN, *ON_TOP)},
        "typed": [key_of(word) for word in typed_overrides(hydra)],
        "derived": derived,
    }


def _word(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def compose(
    overrides: Sequence[str], arguments: Sequence[str] = (), with_hydra: bool = False, saved: Any = None
) -> Any:
    """Compose the configuration of a command line without running anything.

    Args:
        overrides: Its words.
        arguments: The whole command line, where it may name the user's own options (``--config-dir``).
        with_hydra: Whether to return Hydra's own section too, which holds the option of each group.
        saved: What a checkpoint knows (training.checkpoint.configuration.SavedConfig).

    Raises:
        HydraException: Where it cannot be composed.
    """
    register()
    masking.register()
    GlobalHydra.instance().clear()
    folder = config_folder(arguments)
    path = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    search = [] if folder is None else [f"hydra.searchpath=['file://{path}']"]
    words = [*(saved.words if saved is not None else ()), *expand_lists(overrides)]
    with hydra.initialize_config_dir(str(FOLDER), version_base="1.3"):
        cfg = hydra.compose("train", [*words, *search], return_hydra_config=True)
    choices = cfg.hydra.runtime.choices
    if not with_hydra:
        with open_dict(cfg):
            del cfg.hydra
    cfg = _named(cfg, choices)
    if saved is not None:
        saved.lay_under(cfg, choices, expand_lists(overrides))
    return cfg


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


def _for_jobs(overrides: list[str]) -> list[str]:
    """Return what Hydra is given for a sweep over options, such as ``-m model=gpt2,transformer data.seq_len=64``.

    Hydra composes once without what is swept, and would refuse ``data.seq_len`` of the default model's data. As a sweep
    over one value it is left out there too.
    """
    with suppress(HydraException):  # Hydra says what is wrong
        parsed = OverridesParser.create().parse_overrides(overrides)
        if any(one.is_sweep_override() and "." not in one.key_or_group for one in parsed):
            return [_for_job(one) for one in parsed]
    return overrides


def _for_job(one: Override) -> str:
    key, _, value = one.input_line.partition("=")
    is_hydras_own = "." not in key or key.startswith("hydra")
    keeps = is_hydras_own or one.is_delete() or one.is_sweep_override() or not value or one.value() is None
    return one.input_line if keeps else f"{key}=choice({value})"
