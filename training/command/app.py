"""Runs a command: composes its words, converts the configuration to plain data, checks it and calls its mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig

from common.errors import TrainingError, exit_is_failure
from conf.composition import Composed, Program, compose_and_run
from conf.effects import check_effects
from conf.instantiate import use_code_of
from launchers import World
from training.checkpoint.configuration import saved_config
from training.command.ranks import follow, leading
from training.reporting.run_directory import locked_directories, removed_if_unused, take

_OPEN_FILES = 4096  # that a process may have open: a launcher has several for each worker


def run_words(arguments: Sequence[str], act: Callable[[Composed], Any], program: Program | None = None) -> Any:
    """Compose the words of a command line, and return the result of ``act``.

    Args:
        arguments: The words.
        act: Called with the configuration; in a sweep, for each job.
        program: Called with the composed configuration; returns that of a Python program.

    Raises:
        SystemExit: On ranks other than 0, at the end of the run.
    """
    world = World.detect()
    if world is not None and world.rank > 0:
        follow(world, arguments, program)
        raise SystemExit(0)
    with leading(world, arguments) as world, locked_directories():
        return compose_and_run(partial(_act, act, world), arguments, saved_config(arguments), program, _in_directory)


def _in_directory(config: DictConfig) -> AbstractContextManager:
    """Lock the directory of a run or a sweep; return a context that reports a sweep at its end."""
    take(config)
    if config.hydra.mode is RunMode.RUN:
        return nullcontext()
    from training.studies.sweep.report import reported

    return reported(config)


def _act(act: Callable, world: World | None, composed: Composed) -> Any:
    with removed_if_unused(composed.run_dir, composed.files):
        check_effects(composed.cfg, composed.typed, of_sweep=composed.job is not None)
        return act(replace(composed, world=world))


@exit_is_failure()
def execute(composed: Composed) -> None:
    """Run a composed configuration in its mode. Rank 0 of existing ranks leads the other ranks.

    All checks that are possible then are made before any process starts. ``mode=NAME`` is the function ``run`` of
    ``training/command/modes/NAME.py``.

    Args:
        composed: The configuration.

    Raises:
        UserError: An error that the user can act on.
        Stopped: The run was told to stop.
    """
    _allow_open_files()
    composed = plain(composed)
    import_module(f"training.command.modes.{composed.cfg.mode}").run(composed)


def plain(composed: Composed) -> Composed:
    """Convert the configuration to plain data (see ``Composed.plain``), and make the user's code importable."""
    cfg = composed.plain()
    use_code_of(cfg)
    if cfg.cluster is not None:
        from training.studies.planning.paper import check_cluster

        check_cluster(cfg)
    return replace(composed, cfg=cfg)


def check_alone(composed: Composed) -> None:
    """Check that no other processes were started. Raises TrainingError."""
    world = composed.world
    if world is not None and world.size > 1:
        raise TrainingError(
            f"mode={composed.cfg.mode} runs in one process, but {world.size} were started (WORLD_SIZE): omit torchrun"
        )


def _allow_open_files() -> None:
    """Raise the limit of open files of this process and its workers as far as a run may need and the system allows."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES if hard < 0 else min(_OPEN_FILES, hard), hard))
