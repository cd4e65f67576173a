"""Rank 0 prepares a run and sends it to the other ranks, which end if the run cannot begin."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from launchers import stopping
from launchers.failure import EndedTogether
from launchers.heartbeat import await_keys, note, store_of
from launchers.meeting import current_meeting
from launchers.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_POLL_S = 0.05
_HEARD_S = 5.0  # how long rank 0 waits for the others to read that it ends
_READY = "ready"  # the key that rank 0 sets when all ranks are ready


def tell(store: Store, what: str, content: Any) -> None:
    """Send the other ranks the content for which they wait in ``hear``."""
    store.set(what, json.dumps({"content": content}))


def hear(world: World, what: str, timeout_s: float, stops: bool = True) -> Any:
    """Wait for the content that rank 0 sends, for as long as rank 0 is alive. Called within ``rendezvous``.

    Args:
        world: This rank's world.
        what: The name of the content.
        timeout_s: How long rank 0 may send no beat, in seconds.
        stops: Whether a request to stop ends the wait.

    Raises:
        SystemExit: If rank 0 has done its work without a run.
        Stopped: If rank 0 or this rank was asked to stop.
        EndedTogether: If rank 0 has ended with an error.
        LaunchError: If rank 0 sends no beats any more.
    """
    meeting = current_meeting()
    assert meeting is not None, "call hear() within rendezvous()"
    store, names = meeting.store, meeting.names
    note(0, "waiting for rank 0")
    stops = stops and world.origin != "slurm"  # SLURM signals all tasks, and rank 0 queues the job again
    await_keys(store, {0: what}, timeout_s, names, stops)
    note(0, "starting")
    told = json.loads(store.get(what))
    store.add(f"heard-{what}", 1)
    if "content" in told:
        return told["content"]
    if told["exit_code"] == 0:
        raise SystemExit(0)
    if told["exit_code"] == stopping.EXIT_CODE:
        raise stopping.Stopped(f"stopped before the first step, as {names[0]} was")
    raise EndedTogether(f"{names[0]} has ended before the first step: {told['message']}", told["exit_code"])


def ending(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message of an error."""
    return (stopping.EXIT_CODE if isinstance(error, stopping.Stopped) else 1), str(error)


@contextmanager
def ending_together(
    store: Store | None, what: str, describe: Callable[[BaseException], tuple[int, str]] = ending
) -> Iterator[None]:
    """On rank 0, end the other ranks if the block ends before it has sent the content for which they wait.

    Args:
        store: The store of ``rendezvous``; None if there is only one rank.
        what: The name of the content.
        describe: Returns the exit code and the message of an error.
    """
    try:
        yield
    except BaseException as error:
        _tell_end(store, what, *describe(error))
        raise
    _tell_end(store, what, 0, "")


def _tell_end(store: Store | None, what: str, exit_code: int, message: str) -> None:
    if store is None:
        return
    with suppress(Exception):  # if the store is gone, the others notice it
        if store.check([what]):
            return
        store.set(what, json.dumps({"exit_code": exit_code, "message": message}))
        meeting, deadline = current_meeting(), time.monotonic() + _HEARD_S
        others = len(meeting.peers) - 1 if meeting is not None else 0
        # The host of the store stays until the others have read this, which they cannot do after it has ended.
        while store.add(f"heard-{what}", 0) < others and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def ready_together(world: World, timeout_s: float) -> None:
    """Wait until all ranks call this, for as long as they are alive, since a rank may read its data for the first time.

    Raises the errors of ``hear``. Returns at once if the ranks have not met by ``rendezvous``.
    """
    meeting = current_meeting()
    if meeting is None:
        return
    store, names = meeting.store, meeting.names
    if world.rank > 0:
        if stopping.wanted():
            raise stopping.Stopped("stopped before the first step")
        with store_of(names[0]):
            store.set(f"ready-{world.rank}", "")
        hear(world, _READY, timeout_s, stops=False)  # from here on the ranks stop together
        return
    with ending_together(store, _READY):
        if stopping.wanted():
            raise stopping.Stopped("stopped before the first step")
        others = {rank: f"ready-{rank}" for rank in range(1, world.size)}
        await_keys(store, others, timeout_s, names)
        tell(store, _READY, None)
