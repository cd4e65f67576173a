"""Checks of a run before its first step. Their errors state the numbers and a fix.

configuration.py  the values of the sections, without building anything
model.py          the model with its data, its plan and the checkpoint that it starts from
data.py           the data: splits, one sample, the length of the run
layers.py         the facts of the layers, as the examination has found them
loss.py           the loss: its result, its metrics (``models.losses`` has the rules), and whether it takes the targets
memory.py         whether the run fits into memory, before any process is started
ranks.py          whether all ranks belong to one run and start with the same weights, after they have connected

``training.run.prepare`` has tuples of checks, which it calls as early as possible: those that take (cfg) and those that
take (cfg, chain, data) in ``checked_model_and_data``, which paper plans call, too; those that take (setup) in
``prepare``. A check joins the first tuple with the arguments that it needs. ``check_memory_of`` and the checks of
ranks.py are called elsewhere. ``models.chain`` checks the requirements for every model when the chain is made.
"""
