"""Studies that take several runs: the fastest layout, the equality of all layouts, and the best job of a sweep.

planning/      mode=plan and parallel=auto
verification/  mode=verify
sweep/         the page of a multirun
short_run.py   a run of a few steps inside another run
"""
