"""Ranks tell each other their work: a thread writes notes to the store, and a rank reads them after a time-out."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import LaunchError
from launchers.failure import EndedTogether, is_peer_error, is_timeout
from launchers.stopping import Stopped
from launchers.world import Peer, World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# The time between beats. It grows with the time-out, because a store in a file grows with each beat.
_EVERY_S, _BEATS_PER_TIMEOUT = 1.0, 60
_POLL_S, _RANKS_PER_POLL = 0.05, 64
# After a rank gives up, the ranks that wait for it fail at once. Other ranks began to wait later.
_GIVE_UP_S, GIVE_UP_LATE_S = 4.0, 15.0
# A rank that gives up writes so within this time after closing its connections. A dead rank writes nothing.
_TOLD_S = 1.0
_STACK_FRAMES = 12
_READ_S = 5.0  # how long rank 0 waits until the other ranks have read its end
# How a rank has left or is about to leave.
_DONE, STOPPED, _GAVE_UP, _LOST_A_PEER, _UNSAID = "done", "stopped", "gave up", "lost a peer", "its output says why"


@dataclass(frozen=True)
class Note:
    """The last note of a rank.

    Attributes:
        step: The last completed step.
        doing: The work after this step.
        since: When this work began, in seconds since the epoch.
        left: How the rank has left, in words if it has failed; empty while it runs.
        exit_code: Its exit code.
        stack: The stack of its main thread if the work takes long: one line per frame, the innermost first.
        number: The number of the beat. It changes with each beat, which shows that the rank is alive.
    """

    step: int
    doing: str
    since: float
    left: str = ""
    exit_code: int = 0
    stack: Sequence[str] = ()
    number: int = 0

    @property
    def silent_s(self) -> float:
        """Seconds since the work began."""
        return max(0.0, time.time() - self.since)


_mine = Note(0, "starting", time.time())


def note(step: int, doing: str) -> None:
    """Note that this process has completed ``step`` and begins ``doing``, such as "reading data"."""
    global _mine
    _mine = Note(step, doing, time.time())


def here() -> Note:
    """Return this process's last note."""
    return _mine


@contextmanager
def watched(meeting: Meeting, describe: Callable[[BaseException], tuple[int, str]] | None = None) -> Iterator[Meeting]:
    """Show the other ranks the work of this rank while the block runs.

    Args:
        meeting: The ranks that have met.
        describe: Returns the exit code and the message of an error, for the ranks that wait for this one. If rank 0
            ends before all ranks are ready, it waits until they have read them.

    Yields:
        The meeting.

    Raises:
        LaunchError: If the block fails because other ranks have given up waiting for a rank that does not move.
    """
    try:
        yield meeting
    except Stopped:
        meeting.left = STOPPED
        raise
    except BaseException as error:
        lost = isinstance(error, Exception) and not isinstance(error, EndedTogether) and is_peer_error(error)
        if lost and (reason := meeting.explain(is_timeout(error))) is not None:
            raise LaunchError(reason) from None
        if not meeting.left:
            meeting.exit_code, meeting.left = (1, _UNSAID) if describe is None else describe(error)
        raise
    finally:
        meeting.close()
        if describe is not None and meeting.world.rank == 0 and not meeting.ready:
            _await_leaving(meeting.store, meeting.world.size)


def _await_leaving(store: Store, size: int) -> None:
    """Wait until the other ranks have read how rank 0 ends: the store may end with its process."""
    deadline = time.monotonic() + _READ_S
    with suppress(Exception):  # the store is gone
        while time.monotonic() < deadline:
            if sum(bool(at.left) for at in read_notes(store, range(1, size)).values()) == size - 1:
                break
            time.sleep(poll_s(size))


def poll_s(ranks: int) -> float:
    """Return the seconds between two queries of a rank to the store. All ranks together send up to 1,300 a second."""
    return _POLL_S * max(1.0, ranks / _RANKS_PER_POLL)


def read_notes(store: Store, ranks: Iterable[int]) -> dict[int, Note]:
    """Return the last note of each rank that has left one in the store."""
    present = [rank for rank in ranks if store.check([_key(rank)])]
    return {rank: Note(*json.loads(store.get(_key(rank)))) for rank in present}


def describe_stall(notes: dict[int, Note], names: list[str], timeout_s: float) -> str:
    """Return a message that names the ranks for which all other ranks have given up waiting, and their work."""
    lines, stacks = [], []
    for rank, at in sorted(notes.items()):
        since = f"since step {at.step}" if at.step else "before step 1"
        waited = f"for {at.silent_s:.0f} s (parallel.timeout_s={timeout_s:g})"
        lines.append(f"{names[rank]} has not moved {since} {waited}: {at.doing}")
        if at.stack:
            stacks += [f"rank {rank} is at (most recent call first):", *at.stack]
    return "\n".join(["\n".join(lines) + ". The other ranks have given up waiting for it", *stacks])


class Meeting:
    """Ranks that have met. A thread writes this rank's notes; if this rank gives up, it reads those of the other ranks.

    Attributes:
        world: This rank's world.
        store: The store that the ranks share.
        peers: Their machines and addresses, by rank; empty if ``run_workers`` has started them.
        names: Their names in messages, by rank.
        timeout_s: How long they wait for each other, in seconds.
        left: How this rank leaves, in words if it has failed; empty while it runs.
        exit_code: Its exit code.
        ready: Whether all ranks are ready to begin.
    """

    def __init__(self, world: World, store: Store, peers: list[Peer], timeout_s: float) -> None:
        self.world, self.store, self.peers, self.timeout_s = world, store, peers, timeout_s
        self.names = [str(peer) for peer in peers] or [f"rank {rank}" for rank in range(world.size)]
        self.left, self.exit_code, self.ready, self._count = "", 0, False, 0
        note(0, "starting")
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Note that this rank leaves. A store that does not answer delays this by a second at most."""
        self.left = self.left or _DONE
        self._ended.set()
        self._thread.join(_TOLD_S)

    def explain(self, waited: bool) -> str | None:
        """Return a message that names the ranks that do not move.

        Args:
            waited: Whether a wait of this rank has timed out; otherwise it has lost a connection.

        Returns:
            The message; None if no rank has timed out, if all ranks have, or if a rank was lost for another reason.
        """
        self.left = _GAVE_UP if waited else _LOST_A_PEER
        found: list[dict[int, Note]] = []
        asking = threading.Thread(target=lambda: found.append(self._find_silent()), daemon=True)
        asking.start()
        asking.join(GIVE_UP_LATE_S + _GIVE_UP_S)
        if found:
            return describe_stall(found[0], self.names, self.timeout_s) if found[0] else None
        if not waited:
            return None
        step = here().step
        since = f"since step {step}" if step else "before step 1"
        return (
            f"{self.names[0]} has not moved {since} (parallel.timeout_s={self.timeout_s:g}): the store where the ranks "
            f"meet, on its machine, does not answer {self.names[self.world.rank]}. It is stopped, or the network "
            "to it or its machine is down"
        )

    def _find_silent(self) -> dict[int, Note]:
        """Return a note for each other rank that has neither left nor given up.

        Other waiting ranks get some seconds to say that they give up. The result is empty if none does, or if no rank
        is silent. The note of a rank in an earlier step is this rank's own.
        """
        mine, begin, notes = here(), time.monotonic(), {}
        while True:
            self._put()
            with suppress(Exception):  # keep the notes of the last reading
                notes = read_notes(self.store, range(self.world.size))
            silent = {rank: at for rank, at in notes.items() if not at.left and rank != self.world.rank}
            asked_s = time.monotonic() - begin
            given_up = any(at.left == _GAVE_UP for at in notes.values())
            if not silent or asked_s > _TOLD_S and not given_up:
                return {}
            if asked_s > (_GIVE_UP_S if len(silent) == 1 else GIVE_UP_LATE_S):
                # All ranks end a step together, so a rank with an older note is in the step in which this one waits.
                return {rank: at if at.step >= mine.step else mine for rank, at in silent.items()}
            time.sleep(poll_s(self.world.size))

    def _beat(self) -> None:
        self._put()
        while not self._ended.wait(max(_EVERY_S, self.timeout_s / _BEATS_PER_TIMEOUT)):
            self._put()
        self._put()

    def _put(self) -> None:
        # A store may be on a full disk, or gone with the process that hosts it.
        with self._lock, suppress(Exception):
            at = here()
            stack = _main_stack() if at.silent_s > self.timeout_s / 2 else ()
            self._count += 1
            beat = [at.step, at.doing, at.since, self.left, self.exit_code, stack, self._count]
            self.store.set(_key(self.world.rank), json.dumps(beat))


def _key(rank: int) -> str:
    return f"beat-{rank}"


def _main_stack() -> list[str]:
    main = threading.main_thread().ident
    assert main is not None  # it has started
    frames = traceback.extract_stack(sys._current_frames()[main])[-_STACK_FRAMES:]
    return [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}' for frame in reversed(frames)]
