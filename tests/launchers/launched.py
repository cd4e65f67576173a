"""Functions that run in worker processes, for the tests of launchers."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil

from launchers import World
from launchers.meeting import connect


def join_group(world):
    """Opens a gloo process group over connect()'s store."""
    import torch.distributed as dist

    store = connect(world, timeout_s=60)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)


def all_reduce(value):
    """The sum of `value` over the ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(value)])
    dist.all_reduce(total)
    return total.item()


def listening(process):
    """The addresses on which `process` and all processes under it accept TCP connections."""
    family = [process, *process.children(recursive=True)]
    found = [c for member in family for c in member.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [c.laddr.ip for c in found]


def meet(world, folder):
    """Sums over the ranks; each looks at its sockets while the group is up."""
    join_group(world)
    seen = {
        "world": vars(world),
        "sum": all_reduce(10 + world.rank),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "main": getattr(sys.modules["__main__"], "__file__", None),
    }
    seen["listening"] = listening(psutil.Process())
    all_reduce(0)
    print(f"python output of rank {world.rank}")
    os.write(2, f"native output of rank {world.rank}\n".encode())
    Path(folder, f"{world.rank}.json").write_text(json.dumps(seen))


def raise_on(world, rank):
    """`rank` raises while the others wait for it in an all-reduce."""
    join_group(world)
    all_reduce(1)
    if world.rank == rank:
        raise ValueError(f"bad luck on {rank}")
    all_reduce(1)


def killed(world):
    """Rank 1 is killed while rank 0 waits for it in an all-reduce."""
    join_group(world)
    all_reduce(1)
    if world.rank == 1:
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(1)


def leave_silently(world, code):
    """Rank 1 leaves without raising, whatever `code` says."""
    if world.rank == 1:
        print("last words")
        sys.stdout.flush()
        os._exit(code)
    time.sleep(60)


def fail_once(world, folder):
    """Rank 1 fails on the first attempt only."""
    join_group(world)
    marker = Path(folder, "failed")
    if world.rank == 1 and not marker.exists():
        marker.touch()
        raise ValueError("first attempt")
    Path(folder, f"sum-{world.rank}").write_text(str(all_reduce(1)))


def return_with_thread_running(world):
    """Is done at once, but rank 1 leaves a thread behind that sleeps longer than anyone would wait."""
    import threading

    if world.rank == 1:
        threading.Thread(target=time.sleep, args=(300,)).start()


def by_hand():
    """What a process started by hand does: finds itself, meets the others, tells what it saw, and leaves with them."""
    import torch.distributed as dist

    world = World.detect()
    join_group(world)
    seen = {"world": vars(world), "sum": all_reduce(1), "listening": listening(psutil.Process())}
    all_reduce(0)
    print(json.dumps(seen))
    dist.barrier()
    # A group left open ends in its own threads' destructors: "terminate called" now and then, on standard error.
    dist.destroy_process_group()


def abort(world, rank, after_s, timeout_s):
    """`rank` ends as NCCL's watchdog ends a rank that has waited `after_s` seconds; the other does not move."""
    from launchers import heartbeat
    from launchers.meeting import rendezvous

    with rendezvous(world, timeout_s):
        heartbeat.note(3, "in step 4")
        time.sleep(after_s)
        if world.rank == rank:
            os.abort()
        time.sleep(60)


if __name__ == "__main__":
    by_hand()
