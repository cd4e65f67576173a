"""Shares what each rank is doing: a thread writes its notes to the store, and a rank whose wait timed out reads all."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.errors import LaunchError
from launchers.failure import EndedTogether, is_peer_error, is_timeout
from launchers.stopping import Stopped, wanted
from launchers.world import World

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

# Beats are this far apart, and further where ranks wait long for each other: a store that is a file grows with each.
_EVERY_S, _BEATS_PER_TIMEOUT = 1.0, 60
_POLL_S, _RANKS_PER_POLL = 0.05, 64
# After a rank has given up, those that waited for it in turn fail at once. Some began to wait later.
_GIVE_UP_S, _GIVE_UP_LATE_S = 4.0, 15.0
# Within this time a connection that a rank has closed because it gave up is told from one that a dead rank has left.
_TOLD_S = 1.0
_STACK_FRAMES = 12
# How a rank has left, or is about to.
_DONE, _STOPPED, _GAVE_UP, _LOST_A_PEER = "done", "stopped", "gave up", "lost a peer"


@dataclass(frozen=True)
class Note:
    """The last note of a rank.

    Attributes:
        step: The last completed step.
        doing: The work that it began then.
        since: When it began, in seconds since the epoch.
        left: How the rank has left; empty while it runs.
        stack: If the work takes long, the stack of its main thread, one line per frame, the innermost first.
    """

    step: int
    doing: str
    since: float
    left: str = ""
    stack: tuple[str, ...] = ()

    @property
    def silent_s(self) -> float:
        """Seconds since then."""
        return max(0.0, time.time() - self.since)


_mine = Note(0, "starting", time.time())


def note(step: int, doing: str) -> None:
    """Note that this process has done ``step`` and begins with ``doing``, such as "reading data"."""
    global _mine
    _mine = Note(step, doing, time.time())


def here() -> Note:
    """Return this process's last note."""
    return _mine


@contextmanager
def watched(world: World, store: Store, timeout_s: float, names: list[str]) -> Iterator[Beats]:
    """Let the other ranks know what this one is doing while the block runs.

    Args:
        world: This rank's world.
        store: The store that the ranks share.
        timeout_s: How long ranks wait for each other, in seconds.
        names: What to call each rank, by rank.

    Yields:
        This rank's beats, whose ``timeout_s`` may be changed.

    Raises:
        LaunchError: The block has failed because other ranks were lost, and the reason is that some stand still.
    """
    note(0, "starting")
    beats = Beats(world.rank, store, timeout_s)
    try:
        yield beats
    except Stopped:
        beats.left = _STOPPED
        raise
    except EndedTogether:
        raise
    except Exception as error:
        if is_peer_error(error) and (reason := beats.explain(is_timeout(error), names)) is not None:
            raise LaunchError(reason) from None
        raise
    finally:
        beats.close()


def await_keys(store: Store, keys: Mapping[int, str], timeout_s: float, names: list[str], heed: bool = True) -> None:
    """Wait until each rank of ``keys`` has put its key into the store, however long that takes while it is heard.

    Args:
        store: The store that the ranks share.
        keys: The keys, by rank.
        timeout_s: How long a rank may be silent, in seconds.
        names: What to call each rank, by rank.
        heed: Whether a request to stop ends the wait.

    Raises:
        Stopped: This rank was told to stop, or one of those was.
        LaunchError: One of them has left or is silent, or the store is gone.
    """
    heard = {rank: (b"", time.monotonic()) for rank in keys}
    pause_s, look = poll_s(len(names)), time.monotonic()
    with store_of(names[0]):
        while not store.check(list(keys.values())):
            if heed and wanted():
                raise Stopped("stopped before the first step")
            if time.monotonic() >= look:
                look = time.monotonic() + _EVERY_S
                for rank, key in keys.items():
                    _check_heard(store, rank, key, heard, timeout_s, names[rank])
            time.sleep(pause_s)


@contextmanager
def store_of(host: str) -> Iterator[None]:
    """Turn errors of a lost store before the first step into one that states that its ``host`` has ended."""
    try:
        yield
    except Exception as error:
        if not is_peer_error(error):
            raise
        raise LaunchError(
            f"{host}, or the launcher there, has ended before the first step, and with it the store where the ranks "
            f"meet: {error}"
        ) from None


def _check_heard(
    store: Store, rank: int, key: str, heard: dict[int, tuple[bytes, float]], timeout_s: float, name: str
) -> None:
    beat = store.get(_key(rank)) if store.check([_key(rank)]) else b""
    before, since = heard[rank]
    if store.check([key]):
        return
    at = Note(*json.loads(beat)[:-1]) if beat else Note(0, "starting", time.time())
    if at.left == _STOPPED:
        raise Stopped(f"stopped before the first step, as {name} was")
    if at.left:
        raise LaunchError(f"{name} has ended before the first step, {at.doing}; its output says why")
    if beat != before:
        heard[rank] = beat, time.monotonic()
    elif time.monotonic() - since > timeout_s:
        raise LaunchError(
            f"{name} has not been heard for {timeout_s:g} s (parallel.timeout_s): {at.doing}. Its process, its machine "
            "or the network to it has stopped"
        )


def poll_s(ranks: int) -> float:
    """Return how long a rank waits before it asks the store again: all together ask some thousand times a second."""
    return _POLL_S * max(1.0, ranks / _RANKS_PER_POLL)


def read_notes(store: Store, ranks: Iterable[int]) -> dict[int, Note]:
    """Return the last note of each rank that has left one in the store."""
    there = [rank for rank in ranks if store.check([_key(rank)])]
    return {rank: Note(*json.loads(store.get(_key(rank)))[:-1]) for rank in there}


def describe_stall(notes: dict[int, Note], names: list[str], timeout_s: float) -> str:
    """Return a message about the ranks for which all others have given up waiting, with what they are doing."""
    lines, stacks = [], []
    for rank, at in sorted(notes.items()):
        since = f"since step {at.step}" if at.step else "before step 1"
        waited = f"for {at.silent_s:.0f} s (parallel.timeout_s={timeout_s:g})"
        lines.append(f"{names[rank]} has not moved {since} {waited}: {at.doing}")
        if at.stack:
            stacks += [f"rank {rank} stands here (most recent call first):", *at.stack]
    return "\n".join(["\n".join(lines) + ". The other ranks have given up waiting for it", *stacks])


class Beats:
    """This rank's notes in the store, by a thread of their own, and the others' for a rank that gives up.

    Attributes:
        timeout_s: How long ranks wait for each other, in seconds.
        left: How this rank leaves; empty while it runs.
    """

    def __init__(self, rank: int, store: Store, timeout_s: float) -> None:
        self.timeout_s, self.left = timeout_s, ""
        self._rank, self._store, self._count = rank, store, 0
        self._ended, self._one_at_a_time = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say that this rank leaves. Does not wait for a store that does not answer."""
        self.left = self.left or _DONE
        self._ended.set()
        self._thread.join(_TOLD_S)

    def explain(self, waited: bool, names: list[str]) -> str | None:
        """Return a message that names the ranks that do not move.

        Args:
            waited: Whether a wait of this rank has timed out; otherwise it has lost a connection.
            names: What to call each rank, by rank.

        Returns:
            The message; None if no wait has timed out, or the waits of all ranks, or a rank was lost in another way.
        """
        self.left = _GAVE_UP if waited else _LOST_A_PEER
        found: list[dict[int, Note]] = []
        asking = threading.Thread(target=lambda: found.append(self._find_silent(len(names))), daemon=True)
        asking.start()
        asking.join(_GIVE_UP_LATE_S + _GIVE_UP_S)
        if found:
            return describe_stall(found[0], names, self.timeout_s) if found[0] else None
        if not waited:
            return None
        step = here().step
        since = f"since step {step}" if step else "before step 1"
        return (
            f"{names[0]} has not moved {since} (parallel.timeout_s={self.timeout_s:g}): the store where the ranks "
            f"meet, on its machine, does not answer {names[self._rank]}. It is stopped, or the network to it or its "
            "machine is down"
        )

    def _find_silent(self, ranks: int) -> dict[int, Note]:
        """Return the notes of the ranks that neither leave nor give up, once all others have had time to."""
        mine, begin, notes = here(), time.monotonic(), {}
        while True:
            self._put()
            with suppress(Exception):  # what was read last counts
                notes = read_notes(self._store, range(ranks))
            silent = {rank: at for rank, at in notes.items() if not at.left and rank != self._rank}
            asked_s = time.monotonic() - begin
            given_up = any(at.left == _GAVE_UP for at in notes.values())
            if not silent or asked_s > _TOLD_S and not given_up:
                return {}
            if asked_s > (_GIVE_UP_S if len(silent) == 1 else _GIVE_UP_LATE_S):
                # All ranks end a step together, so one whose last note is older stands where this one waits for it.
                return {rank: at if at.step >= mine.step else mine for rank, at in silent.items()}
            time.sleep(poll_s(ranks))

    def _beat(self) -> None:
        self._put()
        while not self._ended.wait(max(_EVERY_S, self.timeout_s / _BEATS_PER_TIMEOUT)):
            self._put()
        self._put()

    def _put(self) -> None:
        # A store may be on a full disk, or gone with the process that hosts it.
        with self._one_at_a_time, suppress(Exception):
            at = here()
            stack = _main_stack() if at.silent_s > self.timeout_s / 2 else ()
            self._count += 1  # each beat differs from the last: a rank that waits sees that this one lives
            beat = [at.step, at.doing, at.since, self.left, stack, self._count]
            self._store.set(_key(self._rank), json.dumps(beat))


def _key(rank: int) -> str:
    return f"beat-{rank}"


def _main_stack() -> list[str]:
    main = threading.main_thread().ident
    assert main is not None  # it runs
    frames = traceback.extract_stack(sys._current_frames()[main])[-_STACK_FRAMES:]
    return [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}' for frame in reversed(frames)]
