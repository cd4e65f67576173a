"""What every worker imports, seconds' work: done once, in the process that forks them."""

import gc

gc.disable()  # a tenth of the time

import parallel.pipe_stage  # noqa: E402, F401
import training.command.app  # noqa: E402
import training.run.rank  # noqa: E402, F401

gc.freeze()  # what was imported stays: workers need not look through it
gc.enable()
