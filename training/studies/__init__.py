"""Questions that many runs answer: which layout is fastest, are all layouts equal, what has a sweep found.

planning/      mode=plan and parallel=auto
verification/  mode=verify
sweep/         the page of a multirun
short_run.py   a run of a few steps inside another one
"""
