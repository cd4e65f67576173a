"""Which layout is fastest: predictions for a described cluster or for this machine, and short runs that check them.

paper.py       predictions for a described cluster; the tables of any search
typed.py       the typed keys of a layout: checks, and the layouts that they allow
choice.py      parallel=auto: measures this machine and chooses the fastest layout
trial.py       a run of a few steps to be measured
comparison.py  mode=compare: runs each strategy's best layout, and shows predicted beside measured
"""

from conf.schema import Root

AUTO = "auto"


def is_automatic(cfg: Root) -> bool:
    """Return whether the layout, or its number of micro-batches, is to be chosen automatically."""
    return AUTO in (cfg.parallel.name, cfg.parallel.chunks)
