"""One job of the command line: check it, then run it here, on workers of this machine, or among ranks that exist."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from launchers import World, connect, run_workers
from training.config import attributes, environment, plain

_KEY = "job"
_MEET_TIMEOUT_S = 60.0


def execute(cfg: Any, run_dir: Path, world: World | None, isolated: bool = False) -> None:
    """Run the composed configuration ``cfg``; rank 0's part where ``world`` says that there are others.

    isolated  in processes of its own even where one is enough, so that nothing is left here for a next job
    Raises one of training.errors.USER_ERRORS; everything that can be checked is, before any process starts.
    """
    from training.report import describe_plan
    from training.setup import prepare

    cfg = attributes(plain(cfg))
    setup = prepare(cfg, world.size if world else None)
    if cfg.mode != "plan":
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(cfg).rstrip(), end="\n\n")
    print(describe_plan(setup.plan, cfg.model.name, setup.data.description, setup.tokens_per_sample), flush=True)
    if cfg.mode == "plan":
        _print_memory(setup)
        return
    processes = setup.plan.processes
    if world is not None:
        _lead(setup, run_dir, world)
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


def _lead(setup, run_dir: Path, world: World) -> None:
    """Rank 0 under torchrun: tell the other ranks what to run and where."""
    from training.run import run

    cfg = setup.cfg
    store = connect(world, cfg.parallel.timeout_s)
    if store is not None:
        store.set(_KEY, json.dumps({"cfg": plain(cfg), "run_dir": str(run_dir)}))
    run(cfg, run_dir, world, store, setup)


def follow(world: World) -> None:
    """A rank other than 0 under torchrun: wait for rank 0's job, so that there is one run directory and one
    configuration, and run it. Says nothing on the console unless it fails."""
    from datetime import timedelta

    from launchers.failure import log_path
    from launchers.worker import redirect_output
    from training.run import run

    store = connect(world, _MEET_TIMEOUT_S)
    store.wait([_KEY], timedelta(seconds=_MEET_TIMEOUT_S))
    job = json.loads(store.get(_KEY))
    logs = Path(job["run_dir"]) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    console = os.dup(2)
    redirect_output(log_path(logs, world.rank))
    try:
        run(attributes(job["cfg"]), Path(job["run_dir"]), world, store)
    except BaseException:
        os.dup2(console, 2)
        raise
    finally:
        sys.stdout.flush()
