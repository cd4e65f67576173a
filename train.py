"""Train any model under any parallel strategy: python train.py parallel=pipe_ddp model=gpt2 (--help lists the rest)."""

from common.machine import spin_briefly, unfailing_output
from launchers import stopping

if __name__ == "__main__":
    stopping.install_handlers()  # before the imports below, which take seconds: a signal during them is not lost
    spin_briefly()

import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from conf import help_page
from conf.composition import Composed, compose, compose_and_run
from conf.words import is_override, quote_values
from launchers import World
from training.command.app import execute
from training.command.checkpoint import saved_config
from training.command.errors import clear_errors
from training.command.ranks import follow, leading


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line in this process, as often as one likes, and return its exit code.

    An error that the user can act on is one message on standard error; one of the program's own is raised. The code is
    0, 1 after an error, or ``stopping.EXIT_CODE`` for a run that was told to stop and can go on. ``argv`` does not hold
    the program's name.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with unfailing_output(), clear_errors():
            world = World.detect()
            if world is not None and world.rank > 0:
                follow(world, arguments)
                return 0
            with leading(world, arguments):
                _lead(arguments)
    except SystemExit as leaving:  # Hydra leaves this way after --cfg
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def _lead(arguments: Sequence[str]) -> None:
    """Do what a command line says, in the one process of a run that reads it."""
    from training.reporting.run_directory import locked_directories

    if {"-h", "--help"} & set(arguments):
        print(help_page(), end="", flush=True)
        return
    words = quote_values(arguments)
    saved = saved_config(words)
    if saved is not None and {"--cfg", "-c"} & set(words):  # of which Hydra would show the files' part
        print(OmegaConf.to_yaml(compose(list(filter(is_override, words)), words, saved=saved)))
        return
    with locked_directories():
        compose_and_run(run, words, saved)


def run(composed: Composed) -> Any:
    """Run what was composed: one run, or one job of a sweep, whose objective is returned."""
    from training.reporting.run_directory import removed_if_unused

    with removed_if_unused(composed.run_dir, composed.files):
        composed = composed.complete()
        if composed.job is not None:
            from training.command.sweep_jobs import run_job

            return run_job(composed, World.detect())
        execute(composed, World.detect())
    return None


if __name__ == "__main__":
    raise SystemExit(main())
