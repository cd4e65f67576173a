"""mode=compare: run the best layout of each strategy, and print predicted beside measured results."""

from __future__ import annotations

from conf.composition import Composed
from launchers import stopping
from training.command.launch import nothing_begun, preload


def run(composed: Composed) -> None:
    """Predict all layouts, and run the best layout of each strategy for some steps."""
    stopping.at_once()
    preload(composed, True)

    from training.studies.planning.comparison import compare

    with nothing_begun():
        print(compare(composed.cfg, composed.run_dir, composed.world, composed.words()))
