"""The configuration of a command, with what a checkpoint knows, and what a checkpoint keeps of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from common.errors import TrainingError
from conf import COMMAND, TRAINED
from conf.instantiate import to_dict

_HYDRA_OPTIONS = (
    "--help --hydra-help --version --cfg --resolve --package --run --multirun --shell-completion --config-path "
    "--config-name --config-dir --experimental-rerun --info"
).split()


def complete(arguments: Sequence[str]) -> list[str]:
    """Command-line arguments with the configuration of the checkpoint that they name, if they name one.

    Raises:
        UserError: A setting is written with dashes. See also ``training.checkpoint.configuration.with_checkpoint``.
    """
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        if option.startswith("--") and not any(known.startswith(option) for known in _HYDRA_OPTIONS):
            setting = argument[2:] if equals else f"{argument[2:]}=VALUE"
            raise TrainingError(f"{argument}: settings are written without dashes: {setting}")
    if not any(re.match(r"\+*(checkpoint|train\.resume)=", argument) for argument in arguments):
        return list(arguments)
    from training.checkpoint.configuration import with_checkpoint  # only now: it imports torch

    return with_checkpoint(arguments)


def to_text(cfg: Any, choices: Mapping[str, str | None]) -> str:
    """What a run says of its configuration: what differs from the defaults; with print_config=true, all of it.

    Args:
        cfg: The configuration as it was composed. Its references are not resolved: what was taken from the environment
            is shown as it was written.
        choices: The option of each group, as Hydra has them.
    """
    from omegaconf import OmegaConf

    from conf.composition import differences
    from training.reporting import mask_secrets
    from training.reporting.console import describe_configuration

    if cfg.print_config:
        return OmegaConf.to_yaml(OmegaConf.create(mask_secrets(to_dict(cfg)))).rstrip()
    chosen, changes = differences(cfg, choices)
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


def _public(value: Any, masked: Any) -> Any:
    """``value`` without the keys whose values were masked."""
    if not isinstance(value, dict):
        return value
    return {k: _public(v, masked[k]) for k, v in value.items() if isinstance(v, dict) or v == masked[k]}
