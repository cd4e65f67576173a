"""Checks of a run before its first step. Their errors state the numbers and a fix.

configuration.py  the values of the sections, without building anything
model.py          the model with its data, its plan and the checkpoint that it starts from
samples.py        the data: the first samples, shapes, splits, the length of the run
memory.py         whether the run fits into memory, before any process is started
ranks.py          whether all ranks belong to one run and start with the same weights, after they have connected

``training.run.prepare.prepare`` calls all but ranks.py's and ``check_memory_of``, each as early as possible. A check
takes (cfg), (cfg, chain, data) or (setup), as the tuple there that it joins.
"""
