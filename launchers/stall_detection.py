"""Which rank the others wait for in vain, found out among ranks that no launcher of this project watches."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from launchers import heartbeat
from launchers.peer_check import PeerCheck
from launchers.world import World

if TYPE_CHECKING:
    from torch.distributed import Store

# One rank gives up, and so do at once those that wait for it in turn.
_GIVE_UP_S = 4.0
_ANSWER_S = 6.0
_POLL_S = 0.1


def silent_ranks(world: World, store: Store, neighbours: PeerCheck, waits: bool) -> str | None:
    """Called by each rank that fails: ``waits`` where it is for another rank's sake. Then the ranks that still run and
    have not failed, in words; None where there are none.

    Returns within some seconds, also where the rank that hosts ``store`` is the one that does not answer.
    """
    found: list[list[int]] = []

    def ask() -> None:
        keys = [f"gave-up-{rank}" for rank in range(world.size)]
        store.set(keys[world.rank], "")
        deadline = time.monotonic() + (_GIVE_UP_S if waits else 0)
        while (left := [r for r, key in enumerate(keys) if not store.check([key])]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        found.append(left)

    asking = threading.Thread(target=ask, name="silent-ranks", daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    if not waits:
        return None
    # Without an answer it is the store's host that stands still.
    running = neighbours.running(found[0] if found else [0])
    if not running:
        return None
    step = heartbeat.here().step
    since = f"since step {step}" if step else "before step 1"
    return (
        f"{', '.join(map(str, running))} has not moved {since}, and the other ranks have given up waiting "
        "(parallel.timeout_s): it is stopped, or stuck"
    )
