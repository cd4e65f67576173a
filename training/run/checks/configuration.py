"""Checks the values of the sections, without building anything."""

from __future__ import annotations

import math

from common.errors import TrainingError
from conf.instantiate import build, check_section, to_dict
from conf.schema import Root
from training.callbacks import build as build_callbacks
from training.callbacks.averaging import averaging_of
from training.optimizer.checks import check_optimizer
from training.reporting.loggers import sections


def check_train(cfg: Root) -> None:
    """Check the rules of the section ``train``, and of restarts. Raises TrainingError."""
    train = cfg.train
    if cfg.mode == "train" and cfg.checkpoint is not None:
        raise TrainingError(
            f"checkpoint={cfg.checkpoint} is for mode=eval, predict, export and sample. To continue its training, set "
            f"train.resume={cfg.checkpoint}; to start from its weights, use mode=export, then model.init_from="
        )
    if (recipe := cfg.get("recipe")) is not None and recipe not in (known := cfg.get("recipes") or {}):
        raise TrainingError(f"recipe={recipe}: model={cfg.model.name} has {', '.join(known) or 'none'}")
    restarts = cfg.launcher.get("max_restarts", 0)
    if restarts < 0:
        raise TrainingError(f"launcher.max_restarts={restarts} must be at least 0")
    if train.steps is None and train.epochs is None:
        raise TrainingError("neither train.steps nor train.epochs is set: say how long, for example train.steps=100")
    bounds = {
        "steps": 1, "global_batch_size": 1, "max_skipped": 0, "profile": 0, "keep_checkpoints": 1,
        "eval_every": 0, "checkpoint_every": 0, "eval_batches": 1, "spike_rollback": 1,
    }  # fmt: skip
    for key, least in bounds.items():
        value = train[key]
        if value is not None and value < least:
            raise TrainingError(f"train.{key}={value} must be at least {least}")
    for key in ("epochs", "grad_clip", "clip_value"):
        value = train[key]
        if value is not None and not 0 < value < math.inf:
            raise TrainingError(f"train.{key}={value} must be above 0, and finite")
    for key, above in (("label_smoothing", 1), ("z_loss", math.inf)):
        if not 0 <= (train[key] or 0) < above:
            raise TrainingError(f"train.{key}={train[key]} must be at least 0, and below {above}")
    if train.spike_factor is not None and not train.spike_factor > 1:
        raise TrainingError(f"train.spike_factor={train.spike_factor} must be above 1, such as 3")
    if train.spike_rollback is not None and train.spike_factor is None:
        raise TrainingError(f"train.spike_rollback={train.spike_rollback} needs train.spike_factor, such as 3")
    if train.test == "best" and train.checkpoint_every is None:
        raise TrainingError("train.test=best needs checkpoints: set train.checkpoint_every=0, or train.test=last")
    if train.deterministic and train.cudnn_benchmark:
        raise TrainingError(
            "train.cudnn_benchmark=true uses the algorithm that was fastest this time, train.deterministic=true the "
            "same one every time: switch one of them off"
        )


def check_components(cfg: Root) -> None:
    """Check the targets and values of optimizer, scheduler, callbacks and loggers. Raises TrainingError."""
    check_optimizer(to_dict(cfg.optim))
    build("scheduler", cfg.scheduler)
    build_callbacks(cfg.callbacks)
    averaging_of(cfg.callbacks)
    for place, section in sections(cfg).items():
        check_section(place, section)
