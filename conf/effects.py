"""Checks that each typed key has an effect: the key that switches it on is set, and something reads it."""

from __future__ import annotations

from collections.abc import Sequence

import yaml
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from conf.words import key_of
from parallel.strategies import names_where

# Keys or whole sections, and the values of other keys that they need to have an effect. Defaults may have no effect.
_NEEDS = {
    "data.column": "data.messages=null", "data.columns": "data.batchify=true", "data.field": "data.messages=null",
    "export": "mode=export", "export.max_batch_size": "export.format=triton", "export_to": "mode=export",
    "model.dpo": "model.loss=dpo", "model.lora": "model.lora.rank!=null", "optim.dampening": "optim.momentum!=0",
    "optim.decay_vectors": "optim.weight_decay!=0 or optim.others!=null or optim.decays!=null", "verify": "mode=verify",
    "scheduler.decay_ratio": "scheduler.decay_steps=null", "scheduler.warmup_ratio": "scheduler.warmup_steps=null",
    "train.keep_checkpoints": "train.checkpoint_every!=null",
    "sample": "mode=train or mode=sample or mode=export or mode=plan or mode=predict", "predict": "mode=predict",
    "train.eval_batches": "train.eval_every!=null or mode=eval", "metrics": "train.eval_every!=null or mode=eval",
    "train.monitor_direction": "train.eval_every!=null",
}  # fmt: skip
# The same for a run. A sweep may have them for those of its jobs that use them.
_PIPELINES = " or ".join(f"parallel={name}" for name in names_where(stage_per_rank=True))
_CHOSEN = "parallel=auto or parallel.strategy!=null"  # then any layout is possible
_NEEDS_OF_RUN = {
    "launcher.max_parallel": "-m", "sample": "model.vocab_size",
    "sample.tokens": "mode=sample or mode=export or mode=predict",
    "parallel.balance": f"{_PIPELINES} or parallel=model_parallel or {_CHOSEN}", "sweep": "-m",
    "parallel.bucket_mb": f"parallel=ddp or parallel=pipe_ddp or {_CHOSEN} or mode=verify",
    "parallel.comm_hook": "parallel.dp!=1 or mode=verify", "parallel.sync_batchnorm": "parallel.dp!=1 or mode=verify",
    "parallel.context": f"parallel.cp!=1 or {_CHOSEN} or mode=verify",
    "parallel.order": f"parallel=pipe_ddp or parallel=pipe_fsdp or {_CHOSEN} or mode=verify",
    **dict.fromkeys(("parallel.schedule", "parallel.stages_per_rank", "train.trace"), f"{_PIPELINES} or {_CHOSEN}"),
}  # fmt: skip
# Keys, or whole sections, that have an effect only if the files of data, optimizer or schedule refer to them.
_REFERRED = ("model.vocabulary.", "model.tokenizer.", "recipes.")


def check_effects(cfg: DictConfig, typed: Sequence[str], of_sweep: bool) -> None:
    """Check that every key on the command line has an effect.

    Args:
        cfg: The composed configuration, with interpolations that are not resolved yet.
        typed: The words of the command line.
        of_sweep: Whether the configuration belongs to a job of a sweep.

    Raises:
        HydraException: A key has no effect, and its value is not null or false. The message names what it needs.
    """
    rows = [*_NEEDS.items(), *([] if of_sweep else _NEEDS_OF_RUN.items())]
    debugs = any(word.startswith("debug=") for word in typed)  # a command may get it in addition
    for key in [key_of(word) for word in typed if not word.startswith(("~", "hydra", *["train."] * debugs))]:
        of_key = [needs for start, needs in rows if f"{key}.".startswith(f"{start}.")]
        why = [needs for needs in of_key if not any(_is_set(cfg, need) for need in needs.split(" or "))]
        name = f"{key}.".replace(f"recipes.{cfg.recipe}.", "recipes.${recipe}.")[:-1]
        if f"{key}.".startswith(_REFERRED) and name not in str([cfg.data, cfg.optim, cfg.scheduler]):
            data = OmegaConf.select(cfg, "data._target_")
            why.append(f"a section that refers to it (recipe={cfg.recipe or 'null'}, data: {data})")
        if why and OmegaConf.select(cfg, key) not in (None, False):
            needed = why[0].replace("!=null", "")
            raise ConfigCompositionException(f"{key} has no effect without {needed}: set that, or leave {key} out")


def _is_set(cfg: DictConfig, need: str) -> bool:
    """Return whether a value is set, such as ``optim.momentum!=0``; without ``=``, whether the key exists."""
    key, equals, wanted = need.partition("=")
    section, _, name = key.rpartition(".")
    if not equals:
        return name in (OmegaConf.select(cfg, section) or ())
    value = OmegaConf.select(cfg, key.rstrip("!"))
    return (getattr(value, "name", value) == yaml.safe_load(wanted)) != key.endswith("!")
