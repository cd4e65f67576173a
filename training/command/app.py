"""Runs a command: composes its words, converts the configuration to plain data, checks it, and calls its mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.types import RunMode
from omegaconf import DictConfig

from common.errors import TrainingError, exit_is_failure
from conf.composition import Composed, Program, compose_and_run
from conf.effects import check_effects
from conf.instantiate import use_code_of
from conf.schema import Root
from launchers import World
from training.checkpoint.configuration import saved_config
from training.command.ranks import follow, leading
from training.reporting.run_directory import locked_directories, removed_if_unused, take

_OPEN_FILES = 4096  # that a process may have open: a launcher has several for each worker


@dataclass(frozen=True)
class Command:
    """A checked configuration and where it is to run.

    Attributes:
        cfg: The configuration, as plain data; ``auto`` is replaced in it by the chosen value.
        composed: The composed configuration that it was made from.
        world: The ranks that exist already; None if this process starts those that the run needs.
        isolated: Run in separate processes even if one process is enough, so that a job of a sweep leaves no state in
            this process for the next job.
    """

    cfg: Root
    composed: Composed
    world: World | None
    isolated: bool = False

    @property
    def run_dir(self) -> Path:
        """The run directory, which exists."""
        return self.composed.run_dir

    def check_alone(self) -> None:
        """Check that no other processes were started. Raises TrainingError."""
        if self.world is not None and self.world.size > 1:
            raise TrainingError(
                f"mode={self.cfg.mode} runs in one process, but {self.world.size} were started (WORLD_SIZE): start it "
                "without torchrun"
            )


def run_words(
    arguments: Sequence[str], act: Callable[[Composed, World | None], Any], program: Program | None = None
) -> Any:
    """Compose the words of a command line, and return the result of acting on them.

    Args:
        arguments: The words.
        act: Called with the configuration and the ranks that exist already; in a sweep, for each job.
        program: How a Python program changes the composed configuration.

    Raises:
        SystemExit: On ranks other than 0, whose run has ended with that of rank 0.
    """
    world = World.detect()
    if world is not None and world.rank > 0:
        follow(world, arguments, program)
        raise SystemExit(0)
    with leading(world, arguments) as world, locked_directories():
        return compose_and_run(partial(_act, act, world), arguments, saved_config(arguments), program, _in_directory)


def _in_directory(config: DictConfig) -> AbstractContextManager:
    """Lock the directory of a run or a sweep; return what reports the sweep at its end."""
    take(config)
    if config.hydra.mode is RunMode.RUN:
        return nullcontext()
    from training.studies.sweep.report import reported

    return reported(config)


def _act(act: Callable, world: World | None, composed: Composed) -> Any:
    with removed_if_unused(composed.run_dir, composed.files):
        check_effects(composed.cfg, composed.typed, of_sweep=composed.job is not None)
        return act(composed, world)


@exit_is_failure()
def execute(composed: Composed, world: World | None, isolated: bool = False) -> None:
    """Run a composed configuration in its mode. Rank 0 of existing ranks leads them.

    Everything that can be checked is checked before any process starts. ``mode=NAME`` is the function ``run`` of
    ``training/command/modes/NAME.py``.

    Args:
        composed: The configuration.
        world: The ranks that exist already; None if this process starts those that the run needs.
        isolated: See ``Command``.

    Raises:
        UserError: An error that the user can act on.
        Stopped: The run was told to stop.
    """
    _allow_open_files()
    cfg = plain(composed)
    import_module(f"training.command.modes.{cfg.mode}").run(Command(cfg, composed, world, isolated))


def plain(composed: Composed) -> Any:
    """Return the configuration as plain data, with how it was composed, and make the user's code importable."""
    cfg = composed.plain()
    use_code_of(cfg)
    if cfg.cluster is not None:
        from training.studies.planning.paper import check_cluster

        check_cluster(cfg)
    return cfg


def _allow_open_files() -> None:
    """Raise the limit of open files of this process and its workers to the number that any run needs, if allowed."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES if hard < 0 else min(_OPEN_FILES, hard), hard))
