"""Ranks that exist already, under torchrun or srun: rank 0 reads the command and sends the other ranks the plan."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from common.errors import UserError, printable
from conf import COMMAND
from conf.composition import Composed, Program, compose, pop_hydra, register_start
from conf.instantiate import to_config, to_dict
from conf.masking import hide, mask_secrets
from launchers import World, stopping
from launchers.failure import EndedTogether
from launchers.heartbeat import note
from launchers.stopping import Stopped
from training.checkpoint.configuration import saved_config
from training.command.errors import described
from training.reporting.metrics import flat
from training.studies.planning import AUTO

if TYPE_CHECKING:
    from training.run.setup import Setup


# What only rank 0 uses, or what differs by machine.
_UNUSED = re.compile(rf"(loggers?|launcher|{COMMAND}|import_from)(\.|$)")


@contextmanager
def leading(world: World | None, arguments: Sequence[str]) -> Iterator[World | None]:
    """On rank 0 of ranks that exist already: meet the other ranks before anything is read or prepared.

    The other ranks wait as long as this rank lives, and end with it if it ends without a run. Yields the world with the
    ranks that have met.
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


def lead(setup: Setup, composed: Composed) -> None:
    """On rank 0 under torchrun or srun: send the other ranks the plan and the configuration to compare, and run.

    Args:
        setup: The objects of the run.
        composed: The configuration as plain data, before decisions.
    """
    from launchers.meeting import describe_peers
    from launchers.rank_0 import tell
    from training.run.rank import run

    world = composed.world
    assert world is not None
    meeting = world.meeting
    with _requeued(world):
        if stopping.wanted():
            raise Stopped("stopped before the first step")
        if meeting is not None:
            print(describe_peers(meeting.peers), flush=True)
            plan, started_again = asdict(setup.plan), setup.cfg.train.resume == AUTO
            shown = mask_secrets(to_dict(composed.cfg))
            tell(meeting, {"plan": plan, "cfg": shown, "start": composed.start, "resumes": started_again})
        run(setup, composed.run_dir, world)


def follow(world: World, arguments: Sequence[str] = (), program: Program | None = None) -> None:
    """Run the command line of this rank by the plan of rank 0, under torchrun or srun. Only errors are printed.

    Args:
        world: Which rank this process is.
        arguments: The command line.
        program: Called with the composed configuration; returns that of a Python program.
    """
    from launchers.meeting import rendezvous
    from launchers.rank_0 import hear
    from launchers.worker import redirect_output
    from parallel.plan import Plan
    from training.run.prepare import build_setup
    from training.run.rank import run

    console = os.dup(2)
    with rendezvous(world, _typed_timeout(arguments)) as world:
        meeting = world.meeting
        try:  # meanwhile, rank 0 composes and prepares
            own = compose(arguments, with_hydra=True, saved=saved_config(arguments), program=program)
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
        tree, run_dir = resolved(own, job["start"])
        check_agrees(tree, job["cfg"])
        if job["resumes"]:  # from the newest checkpoint of the run directory
            tree["train"]["resume"] = AUTO
        redirect_output(run_dir / "logs", world.rank)
        try:
            with _requeued(world):
                run(build_setup(to_config(tree), Plan.from_json(job["plan"]), world), run_dir, world)
        except Stopped:
            raise Stopped from None  # rank 0 prints the message
        except BaseException:
            os.dup2(console, 2)
            raise
        finally:
            sys.stdout.flush()


def resolved(cfg: DictConfig, start: Sequence[Any]) -> tuple[dict[str, Any], Path]:
    """Return the configuration of this rank's command line as plain data, and its run directory.

    Args:
        cfg: The composed configuration, with Hydra's section.
        start: The start time of the run, its id, and the time of Hydra's ``now``, from rank 0.
    """
    began, run_id, now = start
    register_start((float(began), f"{int(run_id, 16):06x}", float(now)))  # no path is made of anything else
    run_dir = cfg.hydra.runtime.output_dir = os.path.abspath(cfg.hydra.run.dir)
    HydraConfig.instance().set_config(cfg)
    pop_hydra(cfg)
    return to_dict(cfg), Path(run_dir)


def check_agrees(tree: dict[str, Any], sent: dict[str, Any]) -> None:
    """Check that rank 0 has the same configuration, as plain data with masked secrets.

    Raises:
        UserError: Values differ. The message names the keys.
    """
    own, theirs = flat(json.loads(json.dumps(mask_secrets(tree)))), flat(sent)  # theirs has been JSON
    differing = [key for key in sorted({*own, *theirs}) if own.get(key) != theirs.get(key) and not _UNUSED.match(key)]
    if differing:
        raise UserError(
            f"rank 0 sends {', '.join(differing)}, which the command line of this rank does not name. Give every "
            "machine the same command line, in the same folder, and the variables that it refers to"
        )


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
