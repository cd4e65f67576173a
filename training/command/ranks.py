"""Ranks that exist already, under torchrun or srun: rank 0 reads the command and sends the others their job."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import printable
from conf.instantiate import to_config, to_dict
from conf.masking import hide
from conf.received import check_received, compose_own
from conf.words import quote_values
from launchers import World, stopping
from launchers.failure import EndedTogether
from launchers.heartbeat import note
from launchers.stopping import Stopped
from training.checkpoint.configuration import saved_config
from training.command.errors import described

if TYPE_CHECKING:
    from launchers.meeting import Peer
    from training.run.setup import Setup

_JOB = "job"  # the key of rank 0's message to the others


@contextmanager
def leading(world: World | None, arguments: Sequence[str]) -> Iterator[None]:
    """Meet the other ranks before anything is read or prepared, on rank 0 of ranks that exist already.

    The others wait as long as this rank lives. They end with it if it ends without a run.
    """
    if world is None or world.size == 1:
        yield
        return
    from launchers.meeting import rendezvous
    from launchers.rank_0 import ending_together

    if world.origin == "torchrun":
        stopping.stop_without_parent()
    with rendezvous(world, _typed_timeout(arguments)) as (store, _), ending_together(store, _JOB, _ended):
        note(0, "reading the command line and preparing the data")
        yield


def _ended(error: BaseException) -> tuple[int, str]:
    """Return the exit code of rank 0 after an error, and its message for the other ranks."""
    if isinstance(error, Stopped):
        return stopping.EXIT_CODE, ""
    if isinstance(error, SystemExit):  # Hydra has printed the reason
        return error.code if isinstance(error.code, int) else int(error.code is not None), "its output says why"
    code, message = described(error)
    return code, message or printable(hide(repr(error)))


def lead(setup: Setup, run_dir: Path, world: World) -> None:
    """On rank 0 under torchrun or srun: send the other ranks the configuration and the run directory, and run."""
    from launchers.meeting import describe_peers, rendezvous
    from launchers.rank_0 import tell
    from training.run.rank import run

    cfg = setup.cfg
    with rendezvous(world, cfg.parallel.timeout_s) as (store, peers), _requeued(world):
        if stopping.wanted():
            raise Stopped("stopped before the first step")
        if store is not None:
            print(describe_peers(peers), flush=True)
            tell(store, _JOB, {"cfg": to_dict(cfg), "run_dir": os.path.abspath(run_dir)})
        run(cfg, run_dir, world, store, setup)


def follow(world: World, arguments: Sequence[str] = (), replaced: Callable[[Any], Any] | None = None) -> None:
    """Run rank 0's job on another rank, under torchrun or srun.

    The configuration and the run directory are rank 0's, so that all ranks have the same. Prints nothing unless it
    fails.

    Args:
        world: Which rank this process is.
        arguments: The command line. It is used to check rank 0's job, and for the time-out, which is needed before the
            configuration arrives.
        replaced: How a Python program changes the configuration that the command line composes.
    """
    from launchers.meeting import rendezvous
    from launchers.rank_0 import hear
    from launchers.worker import redirect_output
    from training.run.rank import run

    console, timeout_s = os.dup(2), _typed_timeout(arguments)
    if world.origin == "torchrun":
        stopping.stop_without_parent()
    with rendezvous(world, timeout_s) as (store, peers), _said_once(world, peers):
        try:  # meanwhile, rank 0 composes and prepares
            words = quote_values(arguments)
            own = compose_own(words, saved_config(words), replaced)
        except Exception as error:  # an error of rank 0 comes first
            own = error
        job = hear(world, _JOB, timeout_s)
        if isinstance(own, Exception):
            raise own
        check_received(job["cfg"], job["run_dir"], own)
        cfg, run_dir = to_config(job["cfg"]), Path(job["run_dir"])
        redirect_output(run_dir / "logs", world.rank)
        try:
            with rendezvous(world, cfg.parallel.timeout_s), _requeued(world):
                run(cfg, run_dir, world, store)
        except Stopped:
            raise Stopped from None  # rank 0 prints the message
        except BaseException:
            os.dup2(console, 2)
            raise
        finally:
            sys.stdout.flush()


@contextmanager
def _said_once(world: World, peers: Sequence[Peer]) -> Iterator[None]:
    """Print why rank 0 has ended only where its message is not seen: pods share no console, ranks of a machine do."""
    try:
        yield
    except EndedTogether as ended:
        mine, first = peers[world.rank], peers[0]
        said = world.origin == "environment" or (mine.leader and mine.machine != first.machine)
        raise EndedTogether(str(ended) if said else "", ended.exit_code) from None


def _typed_timeout(arguments: Sequence[str]) -> float:
    from conf.schema import Parallel

    typed = [word.partition("=")[2] for word in arguments if word.startswith("parallel.timeout_s=")]
    with suppress(ValueError):  # rank 0 reports the error
        return float(typed[-1]) if typed else Parallel.timeout_s
    return Parallel.timeout_s


def _requeued(world: World) -> AbstractContextManager:
    """If a run in a user's batch script is told to stop, queue it again as the same job."""
    from launchers.slurm.task import requeued

    return requeued(world) if world.origin == "slurm" else nullcontext()
