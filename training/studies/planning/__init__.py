"""The search for the fastest layout: predictions for a described cluster or this machine, and short runs to check them.

paper.py       predictions for a described cluster; the tables of any search
typed.py       the typed keys of a layout: their checks, and the layouts that they allow
recall.py      the layout that the training of a checkpoint chose
choice.py      parallel=auto: measures this machine and chooses the fastest layout
trial.py       measurements of a run of a few steps
comparison.py  mode=compare: runs each strategy's best layout, and shows predictions beside measurements
"""

from conf.schema import Root

AUTO = "auto"


def is_automatic(cfg: Root) -> bool:
    """Return whether the layout, or its number of micro-batches, is chosen automatically."""
    return AUTO in (cfg.parallel.name, cfg.parallel.chunks)
