"""The layout and the precision that the training of a checkpoint chose, in place of ``auto``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conf import EVALUATES
from conf.instantiate import in_section, with_values
from conf.schema import Root
from parallel.layout import Layout
from training.checkpoint.files import Checkpoint
from training.run.prepare import BALANCES
from training.studies.planning import AUTO, is_automatic


def recall(cfg: Root, run_dir: Path) -> Any:
    """Return the configuration with the values from the training of the checkpoint to resume or evaluate.

    These values replace ``parallel=auto`` and, for training, ``train.precision=auto``. In the same layout, they also
    replace ``chunks=auto`` and ``balance=time|size``.

    Args:
        cfg: The configuration.
        run_dir: The run directory, for ``train.resume=auto``.
    """
    parallel, evaluates = cfg.parallel, cfg.mode in EVALUATES
    source = cfg.checkpoint if evaluates else cfg.train.resume
    of_training = not evaluates and (cfg.train.precision == AUTO or parallel.balance in BALANCES)
    if source is None or not (is_automatic(cfg) or of_training):
        return cfg
    saved = Checkpoint.newest(run_dir / "checkpoints") if source == AUTO else Checkpoint.find(Path(source))
    if saved is None:
        return cfg
    layout, values = Layout.from_manifest(saved.layout), {}
    if cfg.train.precision == AUTO and not evaluates:
        values["train.precision"] = saved.layout.get("precision", AUTO)
    if parallel.name == AUTO:
        # Late, because the planner's imports take most of a second.
        from training.studies.planning.typed import check_kept, fixed_of

        check_kept(layout, cfg)
        values |= in_section("parallel", layout.keys())
        if saved.config is not None and "recompute" not in fixed_of(cfg):  # older checkpoints have no configuration
            values["train.activation_checkpointing"] = saved.config["train"]["activation_checkpointing"]
    if parallel.name == AUTO or (layout.strategy, layout.pp) == (parallel.name, parallel.pp):
        if parallel.chunks == AUTO:
            values["parallel.chunks"] = layout.chunks
        if parallel.balance in BALANCES:
            values["parallel.balance"] = [*layout.counts]
    return with_values(cfg, values)
