"""What is checked of a run before its first step, each with the numbers and a way out.

configuration.py  the values of the sections, without building anything
model.py          the model with its data, its plan and the checkpoint that it starts from
samples.py        the data: the first samples, shapes, splits, the length of the run
memory.py         whether it fits, before any process is started
ranks.py          whether all ranks are of one run and start with the same weights, once they are connected

``training.run.prepare.prepare`` calls all but the last, in an order in which each is as early as it can be.
"""
