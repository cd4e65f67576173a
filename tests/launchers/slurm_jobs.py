"""What runs in tasks of SLURM jobs, for the tests of launchers.slurm: python -m slurm_jobs FOLDER HOW…"""

import os
import sys
import time
from functools import partial
from pathlib import Path

from launchers import connect
from launchers.slurm_worker import array_index, work


def fail(how, world, give_up):
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


if __name__ == "__main__":
    folder, how = Path(sys.argv[1]), sys.argv[2:][array_index()]
    work(partial(fail, how), folder / "slurm", folder / how, 0)
