"""Ranks note in their store what they are doing, and one that has waited in vain reads who stands still."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from launchers import LaunchError, World, heartbeat
from launchers.failure import is_peer_error
from launchers.heartbeat import note, watched

NAMES = ["rank 0", "rank 1"]
TIMED_OUT = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete")
CLOSED = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1")


@pytest.fixture
def store(monkeypatch):
    from torch.distributed import HashStore

    for name, seconds in {"_EVERY_S": 0.1, "_TOLD_S": 1.0, "_GIVE_UP_S": 1.5, "_GIVE_UP_LATE_S": 3.0}.items():
        monkeypatch.setattr(heartbeat, name, seconds)
    return HashStore()


def run(store, rank, error=None, wait_s=0.0):
    """One rank, which raises ``error`` after ``wait_s``; a test has several in threads, with one note between them."""
    with watched(World(rank, 2, rank, 2, "local"), store, 6.0, NAMES):
        note(7, "reading data")
        time.sleep(wait_s)
        if error is not None:
            raise error


def outcomes(store, *ranks):
    """What each rank raised."""
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, store, rank, **how) for rank, how in enumerate(ranks)]
        return [one.exception(timeout=60) for one in runs]


def test_a_rank_that_stands_still_is_named_with_its_step_and_what_it_was_doing(store):
    waited, _ = outcomes(store, dict(error=TIMED_OUT, wait_s=0.5), dict(wait_s=5.0))
    assert isinstance(waited, LaunchError)
    assert not is_peer_error(waited), "it names the cause"
    assert str(waited).startswith("rank 1 has not moved since step 7 for ")
    assert "(parallel.timeout_s=6): reading data" in str(waited)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([dict(error=TIMED_OUT), dict(error=TIMED_OUT)], id="all have given up"),
        pytest.param([dict(error=CLOSED), dict(wait_s=4.0)], id="a rank has died, and nobody has waited in vain"),
        pytest.param([dict(error=TIMED_OUT), dict()], id="the other is done"),
        pytest.param([dict(error=ValueError("its own")), dict(wait_s=1.0)], id="an error of its own"),
    ],
)
def test_nobody_is_named_where_nobody_stands_still(store, ranks):
    assert outcomes(store, *ranks)[0] is ranks[0]["error"]


def test_a_connection_closed_by_a_rank_that_gave_up_is_no_cause_either(store):
    names = ["rank 0", "rank 1", "rank 2"]
    with watched(World(2, 3, 2, 3, "local"), store, 6.0, names), ThreadPoolExecutor(2) as pool:

        def fail(rank, error):
            with watched(World(rank, 3, rank, 3, "local"), store, 6.0, names):
                raise error

        for one in [pool.submit(fail, 0, TIMED_OUT), pool.submit(fail, 1, CLOSED)]:
            with pytest.raises(LaunchError, match="^rank 2 has not moved before step 1"):
                one.result(timeout=60)
