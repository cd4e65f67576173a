"""A run as a job of a SLURM cluster: its submission, and the work of each task.

The checked configuration travels as a JSON file. ``python -m training.command.slurm_job FOLDER SUBMISSION`` reads it in
each task, and again after the job was queued again. Each submission has its own files, so a second submission into the
same directory changes no job that waits.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.machine import spin_briefly, unfailing_output
from conf.instantiate import environment, to_config, to_dict, use_code_of
from conf.schema import Root
from launchers import World
from launchers.slurm.follow import wait
from launchers.slurm.submit import Job, check_options, submit, write_private
from launchers.slurm.task import array_index, work
from launchers.world import restarts
from training.command.ranks import ended
from training.reporting.job_record import update_job
from training.reporting.run_directory import check_free, hold, locked_directories, release


@dataclass(frozen=True)
class CheckedRun:
    """A checked run.

    Attributes:
        cfg: Its configuration.
        run_dir: Its directory.
        processes: Its number of processes.
    """

    cfg: Root
    run_dir: Path
    processes: int

    @property
    def shape(self) -> str:
        """Equal for runs that can be elements of one job array."""
        return json.dumps([self.processes, to_dict(self.cfg.launcher), environment(self.cfg)], sort_keys=True)


def prepare_here(cfg: Root):
    """Check a run before its submission, for the processes and the GPUs of the job.

    The hardware of this machine is ignored; nothing is measured on it.
    """
    from parallel.devices import Hardware
    from training.run.prepare import prepare

    launcher, per_node = cfg.launcher, cfg.launcher.tasks_per_node
    check_options(launcher)
    if per_node is None and launcher.gpus_per_node is not None and cfg.parallel.dp is None:
        per_node = launcher.gpus_per_node
    world_size = None if per_node is None else launcher.nodes * per_node
    gpus = launcher.gpus_per_node
    on_gpus = cfg.device == "cuda" or (cfg.device == "auto" and gpus is not None)
    return prepare(cfg, world_size, launcher.nodes, Hardware("cuda", gpus) if on_gpus else Hardware("cpu"))


def queue(runs: list[CheckedRun], folder: Path, name: str) -> list[Job]:
    """Submit runs of the same ``shape`` to SLURM: one as a job, several as a job array.

    Raises:
        LaunchError: The queue refuses the runs.
    """
    cfg = runs[0].cfg
    threads = cfg.parallel.threads
    env = environment(cfg) if threads is None else {**environment(cfg), "OMP_NUM_THREADS": str(threads)}
    submission = secrets.token_hex(3)
    for index, run in enumerate(runs):
        job = {"cfg": to_dict(run.cfg), "run_dir": str(run.run_dir)}
        write_private(_config_path(folder, submission, index), json.dumps(job))
    arguments = ["-m", "training.command.slurm_job", str(folder), submission]
    return submit(arguments, [run.run_dir / "logs" for run in runs], cfg.launcher, runs[0].processes, folder, name, env)


def run_as_job(setup: Any, run_dir: Path) -> None:
    """Submit one run; with launcher.wait, follow it to its end.

    Raises:
        LaunchError: The job has failed, or the queue refuses it.
    """
    run = CheckedRun(setup.cfg, run_dir.absolute(), setup.plan.processes)
    release(run_dir)  # the job locks it when it starts
    launcher = setup.cfg.launcher
    (job,) = queue([run], run.run_dir / "slurm", setup.cfg.model.name)
    shape = f"{launcher.nodes} node{'s' * (launcher.nodes > 1)} x {run.processes // launcher.nodes} processes"
    print(f"\njob {job.id} is queued: {shape}; its output: {job.output}", flush=True)
    if not launcher.wait:
        follow = f"follow: tail -F {shlex.quote(str(job.output))}"
        print(f"{follow}\nstate:  squeue --job {job.id}\ncancel: scancel {job.id}")
        return
    wait([job], launcher.poll_s, partial(print, flush=True))
    if job.error is not None:
        raise job.error


def run_in_task(cfg: Root, run_dir: Path, world: World) -> None:
    """Run the part of one rank of the job (see launchers.slurm.task.work)."""
    from launchers.failure import is_peer_error
    from launchers.meeting import describe_peers, rendezvous
    from launchers.rank_0 import hear, tell
    from parallel.plan import Plan
    from training.checkpoint.load import after_restart
    from training.run.prepare import build_setup, describe, prepare
    from training.run.rank import run

    begin = time.monotonic()
    if restarts() > 0:
        cfg = after_restart(cfg, run_dir)
    try:
        with rendezvous(world, cfg.parallel.timeout_s, ended) as world:
            use_code_of(cfg)
            meeting = world.meeting
            if meeting is not None and world.rank > 0:  # rank 0 has measured for all
                setup = build_setup(cfg, Plan.from_json(hear(meeting)), world)
            else:
                setup = prepare(cfg, world.size, world.nodes)
                hold(run_dir)
                if restarts() == 0:  # another job of this directory may have run since this one was queued
                    check_free(run_dir, cfg)
                update_job(run_dir, status="running")
                print(describe(setup), flush=True)
                if meeting is not None:
                    print(describe_peers(meeting.peers), flush=True)
                    tell(meeting, asdict(setup.plan))
            run(setup, run_dir, world)
    except Exception as error:
        # If the launcher did not wait, nobody else records the error.
        if not is_peer_error(error):
            text = str(error) if isinstance(error, UserError) else traceback.format_exc()
            update_job(run_dir, status="failed", error=f"rank {world.rank}: {text}")
        raise
    if world.rank == 0:
        update_job(run_dir, status="finished", seconds=time.monotonic() - begin)


def _config_path(folder: Path, submission: str, index: int) -> Path:
    return folder / f"run_{submission}_{index}.json"


def _main(folder: Path, submission: str) -> None:
    job = json.loads(_config_path(folder, submission, array_index()).read_text())
    cfg, run_dir = to_config(job["cfg"]), Path(job["run_dir"])
    work(partial(run_in_task, cfg, run_dir), folder, run_dir / "logs", cfg.launcher.max_requeues)


if __name__ == "__main__":
    spin_briefly()
    with unfailing_output(), locked_directories():
        _main(Path(sys.argv[1]), sys.argv[2])
