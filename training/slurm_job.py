"""A run as a job of a SLURM cluster: what happens on the submitting side, and in each of its tasks."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError
from launchers import World
from launchers.slurm import Job, Task, submit, tasks_per_node, wait
from launchers.slurm_worker import leave
from launchers.world import restarts
from training.config import environment, to_config, to_dict


@dataclass(frozen=True)
class Ready:
    """A checked run: its configuration as plain data, and its number of processes."""

    tree: dict
    run_dir: Path
    processes: int

    @property
    def shape(self) -> str:
        """Equal for runs that can be elements of one job array."""
        return json.dumps([self.processes, self.tree["launcher"], self.tree["parallel"]["env"]], sort_keys=True)


def prepare_here(cfg: Any):
    """``prepare`` on the submitting side: for the processes that the job will have, and for its devices as far as this
    machine has such (one without a GPU checks the rest)."""
    import torch

    from training.setup import prepare

    launcher, per_node = cfg.launcher, cfg.launcher.tasks_per_node
    if per_node is None and launcher.gpus_per_node is not None and cfg.parallel.dp is None:
        per_node = launcher.gpus_per_node
    world_size = None if per_node is None else launcher.nodes * per_node
    if launcher.gpus_per_node is None or torch.cuda.is_available():
        return prepare(cfg, world_size)
    setup = prepare(to_config({**to_dict(cfg), "device": "cpu"}), world_size)
    setup.cfg.device = cfg.device
    return setup


def ready(setup, run_dir: Path) -> Ready:
    """Raises LaunchError where the processes do not fit the nodes."""
    tasks_per_node(setup.cfg.launcher, setup.plan.processes)
    return Ready(to_dict(setup.cfg), Path(run_dir).absolute(), setup.plan.processes)


def queue(runs: list[Ready], folder: Path, name: str) -> list[Job]:
    """Submit ``runs``, all of one shape; as one array where there are several."""
    cfg = to_config(runs[0].tree)
    threads = cfg.parallel.threads
    env = environment(cfg) if threads is None else {**environment(cfg), "OMP_NUM_THREADS": str(threads)}
    tasks = [Task((run.tree, str(run.run_dir)), str(run.run_dir / "logs")) for run in runs]
    return submit(run_in_task, tasks, cfg.launcher, runs[0].processes, folder, name, env)


def run_as_job(setup, run_dir: Path) -> None:
    """Submit one run; with launcher.wait, see it through and raise what has ended it."""
    run = ready(setup, run_dir)
    launcher = setup.cfg.launcher
    (job,) = queue([run], run.run_dir / "slurm", setup.cfg.model.name)
    shape = f"{launcher.nodes} node{'s' * (launcher.nodes > 1)} x {run.processes // launcher.nodes} processes"
    print(f"\njob {job.id} is queued: {shape}; its output: {job.output}", flush=True)
    if not launcher.wait:
        print(f"follow: tail -F {job.output}\nstate:  squeue --job {job.id}\ncancel: scancel {job.id}")
        return
    wait([job], launcher.poll_s, lambda line: print(line, flush=True))
    if job.error is not None:
        raise job.error


def run_in_task(world: World, tree: dict, run_dir: str) -> None:
    """What each task of the job runs."""
    from launchers.failure import is_peer_error
    from launchers.peer_check import describe_places
    from training.app import describe, rendezvous
    from training.checkpoint.resume import after_restart
    from training.run import run
    from training.setup import prepare
    from training.sweep.record import FAILED, FINISHED, RUNNING

    cfg, folder, begin = to_config(tree), Path(run_dir), time.monotonic()
    if restarts() > 0:
        after_restart(cfg, folder)
    try:
        with rendezvous(world, cfg.parallel.timeout_s, leave) as (store, places):
            setup = prepare(cfg, world.size)
            if world.rank == 0:
                note(folder, status=RUNNING)
                print("\n".join(filter(None, [describe(setup), describe_places(places)])), flush=True)
            run(cfg, folder, world, store, setup)
    except Exception as error:
        # Nobody else records it where the launcher did not wait.
        if not is_peer_error(error):
            text = str(error) if isinstance(error, UserError) else traceback.format_exc()
            note(folder, status=FAILED, error=f"rank {world.rank}: {text}")
        raise
    if world.rank == 0:
        note(folder, status=FINISHED, seconds=time.monotonic() - begin)


def note(folder: Path, **changes: Any) -> None:
    """Record how the job of a sweep in ``folder`` fares; nothing where it is none."""
    from training.sweep.record import read_job, write_job

    job = read_job(folder)
    if job is not None:
        write_job(folder, job.but(**changes))
