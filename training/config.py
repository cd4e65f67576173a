"""The configuration of a command, completed by what a checkpoint knows, and what a checkpoint keeps of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf import COMMAND, TRAINED
from conf.instantiate import to_dict

if TYPE_CHECKING:
    from training.checkpoint.configuration import SavedConfig

_current: SavedConfig | None = None  # of the command that this process works on


def saved_config(arguments: Sequence[str]) -> SavedConfig | None:
    """See ``training.checkpoint.configuration.saved_config``, which is imported only where a checkpoint is named."""
    global _current
    _current = None
    if any(re.match(r"\+*(checkpoint|train\.resume)=", argument) for argument in arguments):
        from training.checkpoint import configuration

        _current = configuration.saved_config(arguments)
    return _current


def without_options_of_checkpoint(words: Sequence[str]) -> list[str]:
    """The words of a job that were typed, without those that a checkpoint has brought."""
    return [word for word in words if _current is None or word not in _current.words]


def completed(cfg: Any, hydra: Any, saved: SavedConfig | None = None) -> tuple[Any, Any]:
    """Complete what Hydra has composed by what the checkpoint knows that the command names.

    Args:
        cfg: The configuration.
        hydra: Hydra's own section.
        saved: What the checkpoint knows; None for that of the last command.

    Returns:
        The configuration, and Hydra's own section with what was typed only. The files that Hydra has written agree.
    """
    from omegaconf import OmegaConf, flag_override

    saved = saved or _current
    if saved is None:
        return cfg, hydra
    hydra = hydra.copy()
    with flag_override(hydra, ["struct", "readonly"], False):
        hydra.overrides.task = [word for word in hydra.overrides.task if word not in saved.words]
    saved.lay_under(cfg, hydra.runtime.choices, OmegaConf.to_container(hydra.overrides, resolve=False)["task"])
    if hydra.output_subdir is not None:
        from training.reporting.run_directory import mask_files

        folder = Path(hydra.runtime.output_dir) / hydra.output_subdir
        OmegaConf.save(cfg, folder / "config.yaml")
        OmegaConf.save(hydra.overrides.task, folder / "overrides.yaml")
        mask_files([folder / "config.yaml", folder / "overrides.yaml"])
    return cfg, hydra


def to_text(cfg: Any, hydra: Any) -> str:
    """What a run says of its configuration: what differs from the defaults; with print_config=true, all of it.

    Args:
        cfg: The configuration as it was composed. Its references are not resolved: what was taken from the environment
            is shown as it was written.
        hydra: Hydra's own section.
    """
    from omegaconf import OmegaConf

    from conf.composition import differences
    from training.reporting import mask_secrets
    from training.reporting.console import describe_configuration

    if cfg.print_config:
        return OmegaConf.to_yaml(OmegaConf.create(mask_secrets(to_dict(cfg)))).rstrip()
    chosen, changes = differences(cfg, hydra)
    return describe_configuration(chosen, mask_secrets(changes))


def kept(cfg: Any) -> dict[str, Any]:
    """What a checkpoint keeps of a configuration: plain data, without secrets and without where to resume."""
    from training.reporting import jsonable, mask_secrets

    whole = to_dict(cfg)
    tree = jsonable({name: whole[name] for name in ("seed", *TRAINED)})
    tree["train"].pop("resume")
    more = {"choices": whole[COMMAND]["choices"]} if COMMAND in whole else {}
    if whole.get("recipe") is not None:
        more["recipe"] = whole["recipe"]
    return {**_public(tree, mask_secrets(tree)), **more}


def _public(value: dict, masked: dict) -> dict:
    """``value`` without the keys whose values were masked."""
    nested = {key: _public(item, masked[key]) for key, item in value.items() if isinstance(item, dict)}
    return {key: nested.get(key, item) for key, item in value.items() if key in nested or item == masked[key]}
