"""Runs in workers, and short runs: the same training, for a few steps and without reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.instantiate import build, to_config, to_dict
from conf.schema import Root
from launchers import World
from launchers.world import restarts

if TYPE_CHECKING:
    from training.run.prepare import PlannedRun


def short_run(cfg: Root, parallel: Mapping[str, Any], more: Mapping[str, Any] | None = None, **train: Any) -> Any:
    """Return a configuration that trains for a few steps without reports.

    Args:
        cfg: The configuration of the training.
        parallel: Keys of the section ``parallel`` to change.
        more: Other sections to change.
        **train: Keys of the section ``train`` to change, including ``steps``.
    """
    tree = to_dict(cfg)
    tree |= {"mode": "train", "logger": {"_target_": "training.reporting.NoLogger"}, "loggers": None, "callbacks": None}
    tree |= {"print_config": False, "launcher": {"name": "local", "max_restarts": 0, "allow_mixed": False}}
    tree["train"] |= {"monitor": None, "monitor_direction": None, "test": "last"}  # some runs have no evaluation
    tree["train"] |= {"resume": None, "epochs": None, "profile": 0, "trace": False, "unfreeze": None, **train}
    tree["parallel"] |= parallel
    if hasattr(build("scheduler", tree["scheduler"]), "on_evaluation"):
        tree["scheduler"] = {"_target_": "training.optimizer.Constant"}
    return to_config(tree | dict(more or {}))


def modules_of_workers(cfg: Root) -> list[str]:
    """Return the modules that the process which forks the workers of a run imports."""
    # With the compiler imported first, the others need no stand-in for it.
    return ["torch._dynamo"] * cfg.train.compile + ["training.command.preload"]


def run_on_rank(world: World, planned: PlannedRun, run_dir: Path) -> dict[str, Any]:
    """Run one rank in a worker of ``launchers``; after a restart, from the newest checkpoint. Returns the summary."""
    from training.checkpoint.load import after_restart
    from training.run.rank import run  # here, because the process that starts the workers does not need it

    if restarts() > 0:
        planned = replace(planned, cfg=after_restart(planned.cfg, run_dir))
    return run(planned.setup(world), run_dir, world)
