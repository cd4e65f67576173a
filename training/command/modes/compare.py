"""mode=compare: run each strategy's best layout, and print predicted beside measured results."""

from __future__ import annotations

from launchers import stopping
from training.command.app import Command
from training.command.launch import nothing_begun, preload


def run(command: Command) -> None:
    """Predict all layouts, and run the best of each strategy for some steps."""
    stopping.at_once()
    preload(command, True)

    from training.studies.planning.comparison import compare

    with nothing_begun():
        print(compare(command.cfg, command.run_dir, command.world, command.composed.words()))
