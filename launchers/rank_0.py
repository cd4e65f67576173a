"""The time before a run begins: rank 0 prepares it and sends it to the others, which end if it cannot begin."""

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
_HEARD_S = 5.0  # how long rank 0 stays for the others to hear that it ends
_READY = "ready"  # what rank 0 tells when all ranks are


def tell(store: Store, what: str, content: Any) -> None:
    """Send the other ranks the content that they wait for in ``hear``."""
    store.set(what, json.dumps({"content": content}))


def hear(world: World, what: str, timeout_s: float, heed: bool = True) -> Any:
    """Return the content that rank 0 sends, waiting as long as rank 0 lives. Call this within ``rendezvous``.

    Args:
        world: This rank's world.
        what: What is told.
        timeout_s: How long rank 0 may be silent, in seconds.
        heed: Whether a request to stop ends the wait.

    Raises:
        SystemExit: Rank 0 has done its work without a run.
        Stopped: Rank 0, or this rank, was told to stop.
        EndedTogether: Rank 0 has ended with an error.
        LaunchError: Rank 0 is not heard any more.
    """
    meeting = current_meeting()
    assert meeting is not None, "call hear() within rendezvous()"
    store, names = meeting.store, meeting.names
    note(0, "waiting for rank 0")
    heed = heed and world.origin != "slurm"  # whose tasks are all told, and rank 0 puts the job into the queue again
    await_keys(store, {0: what}, timeout_s, names, heed)
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
    """On rank 0: if the block ends before it has sent the others the content that they wait for, they end, too.

    Args:
        store: The store of ``rendezvous``; None where there is one rank only.
        what: What is to be told.
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
    with suppress(Exception):  # of a store that is gone: the others see that it is
        if store.check([what]):
            return
        store.set(what, json.dumps({"exit_code": exit_code, "message": message}))
        meeting, deadline = current_meeting(), time.monotonic() + _HEARD_S
        others = len(meeting.places) - 1 if meeting is not None else 0
        # The host stays until the others have heard it: they could not ask any more.
        while store.add(f"heard-{what}", 0) < others and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def ready_together(world: World, timeout_s: float) -> None:
    """Wait until all ranks call this, as long as each of them lives: one may read its data for the first time.

    Raises as ``hear`` does. Nothing is waited for where the ranks have met in another way than by ``rendezvous``.
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
        hear(world, _READY, timeout_s, heed=False)  # from here on the ranks stop together
        return
    with ending_together(store, _READY):
        if stopping.wanted():
            raise stopping.Stopped("stopped before the first step")
        others = {rank: f"ready-{rank}" for rank in range(1, world.size)}
        await_keys(store, others, timeout_s, names)
        tell(store, _READY, None)
