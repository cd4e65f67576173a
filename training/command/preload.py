"""The imports of every worker. They take seconds, so the process that forks the workers does them once."""

import gc

gc.disable()  # saves a tenth of the time

from parallel.late_imports import import_compiler_late  # noqa: E402

import_compiler_late()

import parallel.pipe_stage  # noqa: E402, F401
import training.command.app  # noqa: E402
import training.run.rank  # noqa: E402, F401

gc.freeze()  # imported objects stay: workers need not scan them
gc.enable()
