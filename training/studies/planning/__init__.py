"""Which layout: predicted on paper or for this machine, chosen for a run, and held to short runs.

paper.py       the best layouts of a cluster that is described; the tables of any search
typed.py       what is typed of a layout: checked, and kept
choice.py      parallel=auto: this machine measured, the fastest layout put into the configuration
trial.py       a run of some steps, of which only the measurements stay
comparison.py  mode=compare: each strategy's best, predicted beside measured
"""

from typing import Any

AUTO = "auto"


def is_automatic(cfg: Any) -> bool:
    """Return whether a configuration leaves its layout, or the number of micro-batches, to a choice."""
    return AUTO in (cfg.parallel.name, cfg.parallel.chunks)
