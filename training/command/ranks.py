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
    from training.run.setup import Setup


@contextmanager
def leading(world: World | None, arguments: Sequence[str]) -> Iterator[World | None]:
    """Meet the other ranks before anything is read or prepared, on rank 0 of ranks that exist already.

    The others wait as long as this rank lives. They end with it if it ends without a run. Yields the world, with them.
    """
    if world is None or world.size == 1:
        yield world
        return
    from launchers.meeting import rendezvous

    with rendezvous(world, _typed_timeout(arguments), ended) as world:
        note(0, "reading the command line and preparing the data")
        yield world


def ended(error: BaseException) -> tuple[int, str]:
    """Return the exit code of rank 0 after an error, and its message for the other ranks."""
    if isinstance(error, SystemExit):  # Hydra has printed the reason
        return error.code if isinstance(error.code, int) else int(error.code is not None), "its output says why"
    code, message = described(error)
    return code, message or printable(hide(repr(error)))


def lead(setup: Setup, run_dir: Path, world: World) -> None:
    """On rank 0 under torchrun or srun: send the other ranks the configuration and the run directory, and run."""
    from launchers.meeting import describe_peers
    from launchers.rank_0 import tell
    from training.run.rank import run

    cfg, meeting = setup.cfg, world.meeting
    with _requeued(world):
        if stopping.wanted():
            raise Stopped("stopped before the first step")
        if meeting is not None:
            print(describe_peers(meeting.peers), flush=True)
            tell(meeting, {"cfg": to_dict(cfg), "run_dir": os.path.abspath(run_dir)})
        run(cfg, run_dir, world, setup)


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

    console = os.dup(2)
    with rendezvous(world, _typed_timeout(arguments)) as world:
        meeting = world.meeting
        try:  # meanwhile, rank 0 composes and prepares
            words = quote_values(arguments)
            own = compose_own(words, saved_config(words), replaced)
        except Exception as error:  # an error of rank 0 comes first
            own = error
        try:
            job = hear(meeting)
        except EndedTogether as ended:
            # Its message is on the console that ranks of a machine share. Pods share none.
            mine, first = meeting.peers[world.rank], meeting.peers[0]
            unseen = world.origin == "environment" or (mine.leader and mine.machine != first.machine)
            raise EndedTogether(str(ended) if unseen else "", ended.exit_code) from None
        if isinstance(own, Exception):
            raise own
        check_received(job["cfg"], job["run_dir"], *own)
        cfg, run_dir = to_config(job["cfg"]), Path(job["run_dir"])
        redirect_output(run_dir / "logs", world.rank)
        try:
            with _requeued(world):
                run(cfg, run_dir, world)
        except Stopped:
            raise Stopped from None  # rank 0 prints the message
        except BaseException:
            os.dup2(console, 2)
            raise
        finally:
            sys.stdout.flush()


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
