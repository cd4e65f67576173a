"""The processes of a run: described by the environment, or started on this machine.

Nothing else in the project reads ranks from the environment.

    world = World.detect() or World.alone()          # the rank of this process
    with rendezvous(world, timeout_s=60) as world:   # wait for the other ranks (launchers/meeting.py)
    run_workers(entry, args, 4, "logs")              # or start ranks, each of which calls entry(world, *args)
    results = call_in_workers(function, args, 4)     # the same without output; returns the result of each rank
    WorkerPool(4).call(function, args)               # the same, and the processes stay for the next call
    jobs = submit(arguments, log_dirs, …)            # or queue jobs on a cluster (launchers/slurm)

Importing this package does not import torch.
"""

from launchers.failure import WorkerFailed
from launchers.local import WorkerPool, call_in_workers, run_workers, start_fork_server
from launchers.stopping import Interrupted
from launchers.world import World

__all__ = ["Interrupted", "WorkerFailed", "WorkerPool", "World", "call_in_workers", "run_workers", "start_fork_server"]
