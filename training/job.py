"""One job of the command line: check it, then run it here, on workers of this machine, or among ranks that exist."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launchers import LaunchError, World, connect, run_workers
from training.config import attributes, environment, plain

_KEY = "job"
_MEET_TIMEOUT_S = 60.0


def execute(cfg: Any, run_dir: Path, world: World | None, isolated: bool = False) -> None:
    """Run the composed configuration ``cfg``; rank 0's part where ``world`` says that there are others.

    isolated  in processes of its own even where one is enough, so that nothing is left here for a next job
    Raises one of training.errors.USER_ERRORS; everything that can be checked is, before any process starts.
    """
    from training.choices import recall, settle_chunks
    from training.cluster import prepare_here, run_as_job
    from training.setup import prepare

    cfg = attributes(plain(cfg))
    recall(cfg, run_dir)
    settle_chunks(cfg, run_dir, world)
    queued = world is None and cfg.launcher.name == "slurm"
    setup = prepare_here(cfg) if queued else prepare(cfg, world.size if world else None)
    if cfg.mode != "plan":
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(cfg).rstrip(), end="\n\n")
    print(describe(setup), flush=True)
    if cfg.mode == "plan":
        _print_memory(setup)
        return
    processes = setup.plan.processes
    if world is not None:
        _lead(setup, run_dir, world)
    elif queued:
        run_as_job(setup, run_dir)
    elif processes == 1 and not isolated:
        from training.run import run

        run(cfg, run_dir, setup=setup)
    else:
        del setup  # the workers build their own
        threads = cfg.parallel.threads
        more = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        run_workers(_work, (plain(cfg), str(run_dir)), processes, run_dir / "logs", env={**environment(cfg), **more})


def _print_memory(setup) -> None:
    from training.memory_estimate import estimate_memory
    from training.report import describe_memory

    optim = plain(setup.cfg.optim)
    print("\n" + describe_memory(estimate_memory(setup.plan, setup.chain, setup.sample, optim)))


def _work(world: World, tree: dict, run_dir: str) -> None:
    """What each local worker runs."""
    from training.run import run

    run(attributes(tree), Path(run_dir), world)


def describe(setup) -> str:
    """The plan in words."""
    from training.report import describe_plan

    described = (setup.cfg.model.name, setup.data.description, setup.tokens_per_sample, setup.shares)
    return describe_plan(setup.plan, *described)


@contextmanager
def together(world: World, timeout_s: float) -> Iterator[tuple[Any, list]]:
    """Meet the other ranks: (store, places by rank), or (None, []) for a rank that is alone.

    Raises LaunchError where ranks do not come or machines cannot reach each other, also later, in the middle of the
    work, when a connection is lost: it names the ranks then.
    """
    from launchers.failure import is_peer_error
    from launchers.neighbours import Neighbours

    store = connect(world, timeout_s)
    if store is None:
        yield None, []
        return
    with Neighbours(world, store, timeout_s) as neighbours:
        try:
            yield store, neighbours.places
        except Exception as error:
            lost = neighbours.lost() if is_peer_error(error) else None
            if lost is None:
                raise
            raise LaunchError(lost) from error


def _lead(setup, run_dir: Path, world: World) -> None:
    """Rank 0 under torchrun or srun: tell the other ranks what to run and where."""
    from launchers.neighbours import describe_places
    from training.run import run

    cfg = setup.cfg
    with together(world, cfg.parallel.timeout_s) as (store, places):
        if store is not None:
            print(describe_places(places), flush=True)
            store.set(_KEY, json.dumps({"cfg": plain(cfg), "run_dir": str(run_dir)}))
        with _requeued(world):
            run(cfg, run_dir, world, store, setup)


def follow(world: World) -> None:
    """A rank other than 0 under torchrun or srun: wait for rank 0's job, so that there is one run directory and one
    configuration, and run it. Says nothing on the console unless it fails."""
    from datetime import timedelta

    from launchers.failure import log_path
    from launchers.worker import redirect_output
    from training.run import run

    with together(world, _MEET_TIMEOUT_S) as (store, _):
        store.wait([_KEY], timedelta(seconds=_MEET_TIMEOUT_S))
        job = json.loads(store.get(_KEY))
        logs = Path(job["run_dir"]) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        console = os.dup(2)
        redirect_output(log_path(logs, world.rank))
        try:
            with _requeued(world):
                run(attributes(job["cfg"]), Path(job["run_dir"]), world, store)
        except BaseException:
            os.dup2(console, 2)
            raise
        finally:
            sys.stdout.flush()


@contextmanager
def _requeued(world: World) -> Iterator[None]:
    """A run in a batch script of the user's own that was told to stop goes on as a later attempt of the same job."""
    from launchers.slurm_worker import MAX_REQUEUES, Stopped, go_on_later, heed_termination

    if world.origin == "slurm":
        heed_termination()
    try:
        yield
    except Stopped as stopped:
        go_on_later(world, str(stopped), MAX_REQUEUES)
