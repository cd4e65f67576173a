"""One run: its objects, its checks, and the work of each rank from the first step to the summary.

prepare.py           from a configuration to the objects of a run, checked
setup.py             these objects: model, data, plan
checks/              the checks before the first step
changes.py           the settings that should not change when a run is resumed
rank.py              the work of one rank, from connecting to the summary
loop.py              the training loop, and the profiler (train.profile)
skipping.py          decides which steps count: those with a finite loss and gradients, whatever their metrics are
evaluate.py          an evaluation, and the warning if its results are not finite
first_not_finite.py  finds the first numbers in a step that are not finite
restore.py           loads the whole model of a checkpoint into one process
"""
