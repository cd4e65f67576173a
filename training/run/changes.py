"""The settings that should not change when a run is resumed, and the differences in these settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from conf import TRAINED
from training.checkpoint.files import Checkpoint
from training.reporting.metrics import flat
from training.run.setup import TERMS, Setup

_SAMPLES_KEY, _TOTAL = "samples", "schedule.total"
# Keys of the section train that change what is learned. The chosen precision is added to them.
_LEARNED = (
    "global_batch_size", "grad_clip", "clip_value", "max_skipped", "spike_factor", "spike_rollback", "overfit", "tf32",
    *TERMS, "unfreeze",
)  # fmt: skip
_MICROBATCH = "micro-batch"  # the size of a micro-batch, if the numbers depend on it
# Keys for the location and the reading of the data, without effect on its content.
_NOT_CONTENT = re.compile(r"data\.(parts\.\w+\.)?(root|cache_dir|num_workers)")
_POINTS = 8  # number of steps at which two lengths of a schedule are compared


def recipe(setup: Setup, schedule: Any) -> dict[str, Any]:
    """Return the settings that should not change when a run is resumed, by the names that users type."""
    tree = {name: setup.shown[name] for name in ("seed", *TRAINED)}
    tree["train"] = {name: tree["train"][name] for name in _LEARNED} | {"precision": setup.plan.precision}
    if setup.chain.base is None:  # an older checkpoint has no such keys
        tree["model"] = {name: value for name, value in tree["model"].items() if name != "lora"}
    if follows_total(schedule, setup.total_steps, setup.per_epoch):
        tree["schedule"] = {"total": setup.total_steps}  # _TOTAL
    size, _ = setup.by_microbatch
    if size is not None:
        tree[_MICROBATCH] = size
    return {**flat(tree), _SAMPLES_KEY: setup.data_digest}


def earlier_batches(checkpoint: Checkpoint, setup: Setup) -> list[tuple[int, int]]:
    """Return the earlier sizes of the global batch in a checkpoint's run, each as (last step of this size, size).

    The list is empty if the number of samples has changed since: the samples of a step then depend on its number alone.
    """
    kept, recipe = checkpoint.progress.get("batches", {}), checkpoint.progress.get("recipe", {})
    size = recipe.get("train.global_batch_size", now := setup.cfg.train.global_batch_size)
    if kept.get("samples", len(setup.data.train)) != len(setup.data.train) or setup.cfg.train.overfit:
        return []
    sizes = [(step, size) for step, size in kept.get("earlier", [])]
    return sizes if size == now else [*sizes, (checkpoint.step, size)]


def follows_total(schedule: Any, total: int, per_epoch: int) -> bool:
    """Return whether a schedule's rates depend on the length of the whole run."""
    steps = np.unique(np.linspace(1, total, _POINTS).astype(int)).tolist()
    return any(schedule.factor(step, total, per_epoch) != schedule.factor(step, 2 * total, per_epoch) for step in steps)


def changes(before: Mapping[str, Any], now: Mapping[str, Any], rate: Callable[[int], float]) -> str | None:
    """Return a sentence with the settings that differ between a checkpoint's recipe and this run's; None if none.

    ``rate`` returns the schedule's factor for the next step in a run of so many steps.
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    names = [name for name in names if not _NOT_CONTENT.fullmatch(name)]
    names = [name for name in names if not name.startswith("choice.")]  # only older checkpoints have these
    if not names:
        return None
    listed = (f"{'digest of the data' if n == _SAMPLES_KEY else n} {before.get(n)} -> {now.get(n)}" for n in names)
    was, total = before.get(_TOTAL), now.get(_TOTAL)
    jumps = total not in (None, was) and (was is None or rate(was) != rate(total))
    said = "; the scheduler follows the length of the run, so the learning rate jumps here" if jumps else ""
    return f"this run continues with settings that differ from those before: {', '.join(listed)}{said}"
