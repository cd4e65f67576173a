"""A command: its configuration made plain and checked, then its mode."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from common.errors import exit_is_failure
from conf.composition import Composed
from conf.instantiate import add_to_path
from launchers import World
from training.command.command import Command

_OPEN_FILES = 4096  # that a process may have: a launcher holds several of each worker


@exit_is_failure()
def execute(composed: Composed, world: World | None, isolated: bool = False) -> None:
    """Run a composed configuration in its mode; on rank 0 of existing ranks, lead them.

    Everything that can be checked is checked before any process starts. ``mode=NAME`` is the function ``run`` of
    ``training/command/modes/NAME.py``.

    Args:
        composed: The configuration, complete.
        world: The ranks that exist already; None where this process starts what the run needs.
        isolated: See ``Command``.

    Raises:
        UserError: For what the user can act on.
        Stopped: For a run that was told to stop.
    """
    _allow_open_files()
    cfg = plain(composed)
    import_module(f"training.command.modes.{cfg.mode}").run(Command(cfg, composed, world, isolated))


def plain(composed: Composed) -> Any:
    """Return the configuration as plain data, with how it was composed, and let the user's own code be found."""
    cfg = composed.plain()
    add_to_path(cfg.import_from or ())
    if cfg.cluster is not None:
        from training.studies.planning.paper import check_cluster

        check_cluster(cfg)
    return cfg


def _allow_open_files() -> None:
    """Let this process and its workers have as many open files as they may have, up to what any run needs."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES if hard < 0 else min(_OPEN_FILES, hard), hard))
