"""Read by Python at its start where this folder is on PYTHONPATH: lets a test strike a rank of a SLURM job from within.

SIGRTMIN+1 has its main thread raise ValueError, SIGRTMIN+2 has it leave without a word and with exit code 0.
"""

import os
import signal


def _raise(signum, frame):
    raise ValueError("bad luck")


def _leave(signum, frame):
    os._exit(0)


if os.environ.get("SLURM_STEP_ID"):
    signal.signal(signal.SIGRTMIN + 1, _raise)
    signal.signal(signal.SIGRTMIN + 2, _leave)
