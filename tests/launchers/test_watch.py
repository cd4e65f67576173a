"""A rank that has gone without a word is noticed by the one that watches it, though both wait for something else."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from launchers import World, watch
from launchers.failure import is_peer_error
from launchers.loopback import LOOPBACK, listen
from launchers.peer_check import PeerCheck
from launchers.watch import Watch, say_farewell


@pytest.fixture
def watched(monkeypatch):
    """(the socket of a rank, an event that is set when it is taken for dead, the reasons for which it was lost)"""
    monkeypatch.setattr(watch, "_GRACE_S", 0.2)
    listener = listen(LOOPBACK, 0)
    died, reasons = threading.Event(), []
    watching = Watch(listener.getsockname(), 60, died.set, reasons.append)
    yield listener, died, reasons
    watching.close()
    listener.close()


def test_a_rank_that_goes_without_a_word_is_dead(watched):
    listener, died, reasons = watched
    listener.close()
    assert died.wait(30)
    assert reasons == []


def test_a_rank_that_says_farewell_is_done(watched):
    listener, died, reasons = watched
    say_farewell(listener)
    listener.close()
    assert not died.wait(1)
    assert reasons == []


def test_nobody_is_watched_after_the_end(monkeypatch):
    monkeypatch.setattr(watch, "_GRACE_S", 0.2)
    listener, died = listen(LOOPBACK, 0), threading.Event()
    Watch(listener.getsockname(), 60, died.set, pytest.fail).close()
    listener.close()
    assert not died.wait(1)


@pytest.fixture
def pair(monkeypatch):
    """Two ranks of a run, in threads of this process."""
    from torch.distributed import HashStore

    monkeypatch.setattr(watch, "_GRACE_S", 0.2)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", "29500")  # only its machine is asked for
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        meet = lambda rank: PeerCheck(World(rank, 2, rank, 2, "environment"), store, 60)  # noqa: E731
        both = list(pool.map(meet, range(2)))
    yield both
    for rank in both:
        rank.close()


def test_a_dead_rank_is_named_and_taken_for_no_more_than_a_lost_connection(pair):
    errors = queue.Queue()
    pair[0].watch(errors.put)
    pair[1].close(finished=False)
    error = errors.get(timeout=30)
    assert str(error).startswith("rank 1 (")
    assert str(error).endswith(", 127.0.0.1) has ended before its work was done, without a word")
    assert is_peer_error(error), "so that the launcher looks for the cause elsewhere"


def test_ranks_that_are_done_leave_in_any_order(pair):
    errors = queue.Queue()
    for rank in pair:
        rank.watch(errors.put)
    pair[1].close()
    with pytest.raises(queue.Empty):
        errors.get(timeout=1)
