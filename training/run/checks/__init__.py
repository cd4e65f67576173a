"""Checks of a run before its first step. Their errors state the numbers and a fix.

configuration.py  the values of the sections, without building anything
model.py          the model with its data, its plan and the checkpoint that it starts from
data.py           the data: splits, one sample, the length of the run
layers.py         what the examination has found of the layers
loss.py           the loss and its metrics: what it returns, and whether it takes the targets
memory.py         whether the run fits into memory, before any process is started
ranks.py          whether all ranks belong to one run and start with the same weights, after they have connected

``training.run.prepare`` has tuples of checks, which it calls as early as possible: those that take (cfg) and those that
take (cfg, chain, data) in ``checked_model_and_data``, which paper plans call, too; those that take (setup) in
``prepare``. A check joins the first tuple that has what it needs. ``check_memory_of`` and ranks.py's are called
elsewhere. What every model must fulfil, whatever the mode, is checked in ``models.chain`` when the chain is made.
"""
