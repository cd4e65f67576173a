"""The processes of a run: described by the environment, or started on this machine.

Nothing else in the project reads ranks from the environment.

    world = World.detect() or World.alone()          # the rank of this process
    with rendezvous(world, timeout_s=60) as world:   # wait for the other ranks (launchers/meeting.py)
    run_workers(entry, args, 4, "logs")              # or start ranks, each of which calls entry(world, *args)
    results = call_in_workers(function, args, 4)     # the same without output; returns the result of each rank
    jobs = submit(arguments, log_dirs, …)            # or queue jobs on a cluster (launchers/slurm)

Importing this package does not import torch.
"""

from launchers.failure import WorkerFailed
from launchers.local import call_in_workers, run_workers, start_fork_server
from launchers.stopping import Interrupted
from launchers.world import World

__all__ = [
    "Interrupted",
    "WorkerFailed",
    "World",
    "call_in_workers",
    "run_workers",
    "start_fork_server",
]
