"""Checks that each typed key has an effect: what switches it on is set, and something reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from conf.words import key_of

# Keys, or whole sections, and the values of other keys without which they have no effect. Defaults may be idle.
_NEEDS = {
    "data.column": "data.messages=null", "data.columns": "data.batchify=true", "data.field": "data.messages=null",
    "export": "mode=export", "export.max_batch_size": "export.format=triton", "export_to": "mode=export",
    "model.lora": "model.lora.rank!=null", "optim.dampening": "optim.momentum!=0",
    "optim.decay_vectors": "optim.weight_decay!=0 or optim.others!=null", "verify": "mode=verify",
    "scheduler.warmup_ratio": "scheduler.warmup_steps=null", "train.keep_checkpoints": "train.checkpoint_every!=null",
}  # fmt: skip
# Keys, or whole sections, that have an effect only if the files of data, optimizer or schedule refer to them.
_REFERRED = ("model.vocabulary.", "model.tokenizer.", "recipes.")


def check_effects(cfg: Any, typed: Sequence[str]) -> None:
    """Check the typed words of a composed configuration, whose references are not resolved.

    Raises:
        HydraException: A key has no effect. The message names it, and what it needs.
    """
    for key in [key_of(word) for word in typed if not word.startswith(("~", "hydra"))]:
        why = [needs for start, needs in _NEEDS.items() if f"{key}.".startswith(f"{start}.") and not _any(cfg, needs)]
        name = f"{key}.".replace(f"recipes.{cfg.recipe}.", "recipes.${recipe}.")[:-1]
        if f"{key}.".startswith(_REFERRED) and name not in str([cfg.data, cfg.optim, cfg.scheduler]):
            data = OmegaConf.select(cfg, "data._target_")
            why.append(f"a section that refers to it (recipe={cfg.recipe or 'null'}, data: {data})")
        if why and OmegaConf.select(cfg, key) not in (None, False):
            needed = why[0].replace("!=null", "")
            raise ConfigCompositionException(f"{key} has no effect without {needed}: set that, or leave {key} out")


def _any(cfg: Any, needs: str) -> bool:
    """Return whether one of the values is set: ``optim.momentum!=0 or optim.others!=null``."""
    for key, _, wanted in (need.partition("=") for need in needs.split(" or ")):
        value = OmegaConf.select(cfg, key.rstrip("!"))
        if (getattr(value, "name", value) == yaml.safe_load(wanted)) != key.endswith("!"):
            return True
    return False
