"""Functions that run in tasks of SLURM jobs, for the tests of launchers.slurm."""

import os
import time

from launchers import connect


def fail(world, how):
    """Rank 2 ends as ``how`` says while the others wait for it; a rank that only lost its connection says so."""
    store = connect(world, timeout_s=60)
    if how == "fine":
        return
    if world.rank == 2:
        if how == "raise":
            raise ValueError("bad luck")
        if how == "exit":
            os._exit(3)
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            store.add("still here", 1)
            time.sleep(0.1)
    finally:
        if world.rank == 0 and how == "linger":
            print("ended by itself")
