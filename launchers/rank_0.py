"""Rank 0 prepares a run and sends it to the other ranks, which end if the run cannot begin.

It says one thing after another, and the others wait for each: the contents of a run, and at last that all are ready, or
that it ends. All of this is within ``rendezvous``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from launchers import stopping
from launchers.failure import EndedTogether
from launchers.heartbeat import await_keys, note, store_of
from launchers.meeting import Meeting

_POLL_S = 0.05
_HEARD_S = 5.0  # how long rank 0 waits for the others to read that it ends
_HEARD = "heard-the-end"


def tell(meeting: Meeting, **said: Any) -> None:
    """Send the other ranks the ``content`` for which they wait in ``hear``, or the ``exit_code`` of rank 0."""
    meeting.store.set(_next(meeting), json.dumps(said))


def hear(meeting: Meeting, stops: bool = True) -> Any:
    """Wait for the content that rank 0 sends, for as long as rank 0 is alive.

    Args:
        meeting: The ranks that have met.
        stops: Whether a request to stop ends the wait.

    Raises:
        SystemExit: If rank 0 has done its work without a run.
        Stopped: If rank 0 or this rank was asked to stop.
        EndedTogether: If rank 0 has ended with an error.
        LaunchError: If rank 0 sends no beats any more.
    """
    name, key = meeting.names[0], _next(meeting)
    note(0, "waiting for rank 0")
    stops = stops and meeting.world.origin != "slurm"  # SLURM signals all tasks, and rank 0 queues the job again
    await_keys(meeting.store, {0: key}, meeting.beats.timeout_s, meeting.names, stops)
    note(0, "starting")
    said = json.loads(meeting.store.get(key))
    if "content" in said:
        return said["content"]
    meeting.store.add(_HEARD, 1)
    if said["exit_code"] == 0:
        raise SystemExit(0)
    if said["exit_code"] == stopping.EXIT_CODE:
        raise stopping.Stopped(f"stopped before the first step, as {name} was")
    raise EndedTogether(f"{name} has ended before the first step: {said['message']}", said["exit_code"])


def _next(meeting: Meeting) -> str:
    meeting.messages += 1
    return f"message-{meeting.messages}"


@contextmanager
def ending_together(meeting: Meeting | None, describe: Callable[[BaseException], tuple[int, str]]) -> Iterator[None]:
    """On rank 0, end the other ranks if the block ends before all are ready.

    Args:
        meeting: The ranks that have met; None if there is only one rank.
        describe: Returns the exit code and the message of an error.
    """
    exit_code, message = 0, ""
    try:
        yield
    except BaseException as error:
        exit_code, message = describe(error)
        raise
    finally:
        if meeting is not None and meeting.world.rank == 0 and not meeting.ready:
            with suppress(Exception):  # if the store is gone, the others notice it
                tell(meeting, exit_code=exit_code, message=message)
                deadline = time.monotonic() + _HEARD_S
                # The host of the store stays until the others have read this, which they cannot do after it has ended.
                while meeting.store.add(_HEARD, 0) < meeting.world.size - 1 and time.monotonic() < deadline:
                    time.sleep(_POLL_S)


def ready_together(meeting: Meeting, timeout_s: float) -> None:
    """Wait until all ranks call this, for as long as they are alive, since a rank may read its data for the first time.

    Raises the errors of ``hear``.
    """
    meeting.allow(timeout_s)
    if stopping.wanted():
        raise stopping.Stopped("stopped before the first step")
    if meeting.world.rank > 0:
        with store_of(meeting.names[0]):
            meeting.store.set(f"ready-{meeting.world.rank}", "")
        hear(meeting, stops=False)  # from here on the ranks stop together
    else:
        others = {rank: f"ready-{rank}" for rank in range(1, meeting.world.size)}
        await_keys(meeting.store, others, timeout_s, meeting.names)
        tell(meeting, content=None)
        meeting.ready = True
