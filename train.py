"""Train any model under any parallel strategy: python train.py parallel=pipe_ddp model=gpt2 (--help lists the rest)."""

import sys
from contextlib import suppress

from common.errors import UserError
from common.machine import collect_rarely, spin_briefly, unfailing_output
from launchers import World, start_fork_server, stopping
from parallel.strategies import types_workers

if __name__ == "__main__":
    stopping.install_handlers()  # before the imports below, which take seconds: a signal during them is not lost
    spin_briefly()
    collect_rarely()
    if types_workers(sys.argv[1:]) and not World.is_described():
        with suppress(UserError):  # the run will raise it again
            start_fork_server(["training.command.preload"], early=True)

from collections.abc import Sequence
from typing import Any

from conf.composition import Composed
from training.command.app import execute, run_words
from training.command.errors import clear_errors


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line in this process and return its exit code. This function can be called repeatedly.

    A user error becomes one message on standard error; an internal error is raised. The exit code is 0 after success,
    1 after an error, or ``stopping.EXIT_CODE`` if the run was told to stop and can continue. ``argv`` excludes the
    program's name.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with unfailing_output(), clear_errors():
            if not {"-h", "--help"} & set(arguments):
                run_words(arguments, run)
            elif (world := World.detect()) is None or world.rank == 0:
                from conf import help

                print(help.answer(arguments), end="", flush=True)
    except SystemExit as leaving:  # by Hydra after --hydra-help, by a rank other than 0 after its run
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


def run(composed: Composed) -> Any:
    """Execute a composed configuration: one run, or one job of a sweep. Return the objective of a job."""
    if composed.job is None:
        return execute(composed)
    from training.command.sweep_jobs import run_job

    return run_job(composed)


if __name__ == "__main__":
    code = main()
    stopping.ignore()
    raise SystemExit(code)
