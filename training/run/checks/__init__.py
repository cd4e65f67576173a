"""Checks of a run before its first step. Their errors state the numbers and a fix.

configuration.py  the values of the sections, without building anything
model.py          the model with its data, its plan and the checkpoint that it starts from
data.py           the data: splits, one sample, the length of the run
layers.py         the facts of the layers that the examination has found
loss.py           the loss: its result, its metrics (``models.losses`` has the rules), and whether it takes the targets
memory.py         whether the run fits into memory, before any process is started
ranks.py          whether all ranks belong to one run and start with the same weights, after they have connected
order.py          tuples of all checks, as ``training.run.prepare`` calls them

``checked_model_and_data``, which paper plans call too, calls the checks that take (cfg) and the checks that take (cfg,
chain, data). ``prepare`` calls the checks that take (setup). Add a check to the first tuple that has the arguments it
needs. ``check_memory_of`` and the checks of ranks.py are called elsewhere. ``models.chain`` checks every model's
requirements when the chain is made.
"""
