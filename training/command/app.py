"""Runs a command: converts its configuration to plain data, checks it, and calls its mode."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from common.errors import exit_is_failure
from conf.composition import Composed
from conf.instantiate import add_to_path
from launchers import World
from training.command.command import Command

_OPEN_FILES = 4096  # that a process may have open: a launcher has several for each worker


@exit_is_failure()
def execute(composed: Composed, world: World | None, isolated: bool = False) -> None:
    """Run a composed configuration in its mode. Rank 0 of existing ranks leads them.

    Everything that can be checked is checked before any process starts. ``mode=NAME`` is the function ``run`` of
    ``training/command/modes/NAME.py``.

    Args:
        composed: The configuration, complete.
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
    add_to_path(cfg.import_from or ())
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
