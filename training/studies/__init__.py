"""Questions that take several runs: which layout is fastest, are all layouts equal, which job of a sweep is best.

planning/      mode=plan and parallel=auto
verification/  mode=verify
sweep/         the page of a multirun
short_run.py   a run of a few steps inside another one
"""
