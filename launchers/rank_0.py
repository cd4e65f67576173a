"""Rank 0 prepares a run and sends it to the other ranks, which end if the run cannot begin.

The other ranks wait for the run, and later until all ranks are ready, as long as rank 0 lives. Its beats say how it
ends. All of this happens within ``rendezvous``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from common.errors import LaunchError
from launchers.failure import EndedTogether, is_peer_error
from launchers.heartbeat import STOPPED, Meeting, Note, note, poll_s, read_notes
from launchers.stopping import Stopped, wanted


def tell(meeting: Meeting, content: Any) -> None:
    """Send the other ranks what ``hear`` returns there."""
    meeting.store.set("job-0", json.dumps(content))


def hear(meeting: Meeting) -> Any:
    """Wait until rank 0 sends the run, as long as rank 0 lives, and return it.

    Raises:
        SystemExit: If rank 0 has done its work without a run.
        Stopped: If rank 0 or this rank was asked to stop.
        EndedTogether: If rank 0 has ended with an error.
        LaunchError: If rank 0 no longer sends beats.
    """
    note(0, "waiting for rank 0")
    # SLURM signals all tasks, and rank 0 queues the job again.
    _await(meeting, "job", [0], stops=meeting.world.origin != "slurm")
    note(0, "starting")
    return json.loads(meeting.store.get("job-0"))


def ready_together(meeting: Meeting, timeout_s: float) -> None:
    """Wait until all ranks call this, as long as they live: a rank may take long to read its data for the first time.

    Then ranks wait ``timeout_s`` seconds for each other. Raises the errors of ``hear``.
    """
    meeting.store.set_timeout(timedelta(seconds=timeout_s))
    meeting.timeout_s = timeout_s
    if wanted():
        raise Stopped("stopped before the first step")
    if meeting.world.rank > 0:
        with _host_lives(meeting):
            meeting.store.set(f"ready-{meeting.world.rank}", "")
        _await(meeting, "ready", [0], stops=False)  # from here on the ranks stop together
    else:
        _await(meeting, "ready", range(1, meeting.world.size), stops=True)
        meeting.store.set("ready-0", "")
        meeting.ready = True


def _await(meeting: Meeting, what: str, ranks: Sequence[int], stops: bool) -> None:
    """Wait until each of ``ranks`` has set its key "WHAT-RANK" in the store, as long as it sends beats.

    If ``stops``, a request to stop ends the wait.
    """
    heard = dict.fromkeys(ranks, (Note(0, "starting", time.time()), time.monotonic()))
    with _host_lives(meeting):
        while missing := [rank for rank in ranks if not meeting.store.check([f"{what}-{rank}"])]:
            if stops and wanted():
                raise Stopped("stopped before the first step")
            for rank, at in read_notes(meeting.store, missing).items():
                if at != heard[rank][0]:
                    heard[rank] = at, time.monotonic()
            for rank in missing:
                _check_alive(meeting, rank, *heard[rank])
            time.sleep(poll_s(meeting.world.size))


def _check_alive(meeting: Meeting, rank: int, at: Note, since: float) -> None:
    name, timeout_s = meeting.names[rank], meeting.timeout_s
    if at.left == STOPPED:
        raise Stopped(f"stopped before the first step, as {name} was")
    if at.left and rank > 0:
        raise LaunchError(f"{name} has ended before the first step, {at.doing}; {at.left}")
    if at.left and at.exit_code:
        raise EndedTogether(f"{name} has ended before the first step: {at.left}", at.exit_code)
    if at.left:
        raise SystemExit(0)
    if time.monotonic() - since > timeout_s:
        raise LaunchError(
            f"{name} has not been heard for {timeout_s:g} s (parallel.timeout_s): {at.doing}. Its process, its machine "
            "or the network to it has stopped"
        )


@contextmanager
def _host_lives(meeting: Meeting) -> Iterator[None]:
    """If the store is lost before the first step, raise an error that its host has ended."""
    try:
        yield
    except Exception as error:
        if isinstance(error, EndedTogether) or not is_peer_error(error):
            raise
        raise LaunchError(
            f"{meeting.names[0]}, or the launcher there, has ended before the first step, and with it the store where "
            f"the ranks meet: {error}"
        ) from None
