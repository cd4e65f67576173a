"""A rank that dies without a word is noticed by the one that watches it, though both wait for something else."""

import queue
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from launchers import LaunchError, World, heartbeat, peer_check
from launchers.failure import is_peer_error
from launchers.peer_check import PeerCheck
from launchers.world import LOOPBACK


@pytest.fixture
def pair(monkeypatch):
    """Two ranks of a run, in threads of this process."""
    from torch.distributed import HashStore

    monkeypatch.setattr(peer_check, "_GRACE_S", 0.2)
    monkeypatch.setattr(peer_check, "_GIVE_UP_S", 0.5)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)
    monkeypatch.setenv("MASTER_PORT", "29500")  # only its machine is asked for
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        meet = lambda rank: PeerCheck(World(rank, 2, rank, 2, "environment"), store, 60)  # noqa: E731
        both = list(pool.map(meet, range(2)))
    yield both
    for rank in both:
        rank.close()


def test_ranks_that_share_a_machine_without_a_local_rank_are_refused(monkeypatch):
    from torch.distributed import HashStore

    monkeypatch.setattr(peer_check, "own_address", lambda: LOOPBACK)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    store = HashStore()
    meet = lambda rank: PeerCheck(World(rank, 2, 0, 1, "environment"), store, 60)  # noqa: E731
    with ThreadPoolExecutor(2) as pool:
        for answer in [pool.submit(meet, rank) for rank in range(2)]:
            with pytest.raises(LaunchError, match="ranks 0, 1 are all on .* and LOCAL_RANK is not set"):
                answer.result(timeout=30)


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


def test_nobody_is_watched_after_the_end(pair):
    errors = queue.Queue()
    pair[0].watch(errors.put)
    pair[0].close()
    pair[1].close(finished=False)
    with pytest.raises(queue.Empty):
        errors.get(timeout=1)


def test_a_rank_that_still_runs_after_the_others_have_given_up_is_named(pair):
    heartbeat.note(7, "in step 8")
    assert "rank 1 (" in (reason := pair[0].explain())
    assert "has not moved since step 7, and the other ranks have given up waiting" in reason


def test_ranks_that_all_give_up_name_nobody(pair):
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(PeerCheck.explain, pair)) == [None, None]


def test_a_rank_that_is_stuck_shows_its_stack_and_those_that_gave_up_do_not(pair, monkeypatch, capsys):
    monkeypatch.setattr(peer_check, "_SHOW_S", 0.5)
    heartbeat.note(3, "in step 4")
    for rank in pair:
        rank._patience_s = 0.5
        rank.watch(lambda error: None)
    pair[0].explain()
    time.sleep(2)
    said = capsys.readouterr().err
    assert said.startswith("rank 1 has not moved for 1 s and stands here") and "rank 0" not in said
    assert "time.sleep(2)" in said.splitlines()[-1]
