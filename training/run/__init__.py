"""One run: its objects, its checks, and what each of its ranks does from the first step to the summary.

prepare.py           from a configuration to the objects of a run, checked
setup.py             these objects: model, data, plan
checks/              what is checked before the first step
changes.py           the settings in which a resumed run should equal the run before
rank.py              what one rank does, from connecting to the summary
loop.py              the training loop, and the profiler (train.profile)
skipping.py          which steps count: those with a finite loss and gradients, whatever their metrics are
evaluate.py          an evaluation, and the warning if its results are not finite
first_not_finite.py  where in a step the first numbers that are not finite come from
restore.py           a checkpoint's whole model in one process
"""
