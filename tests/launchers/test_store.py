"""How ranks that were started by hand meet."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import launched
import pytest
from commandline import Forked
from torch.distributed import HashStore

from common.errors import LaunchError
from launchers import World, meeting, stopping
from launchers.heartbeat import poll_s
from launchers.meeting import connect, listen, use_loopback
from launchers.world import is_loopback


@pytest.fixture
def port(monkeypatch):
    with listen("127.0.0.1", 0) as listener:
        number = listener.getsockname()[1]
    # Set and deleted once, so that what connect() sets is undone after the test.
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number


def test_two_ranks_started_by_hand_meet_and_listen_on_loopback_only(port, tmp_path):
    processes, errors = [], tmp_path / "errors"
    errors.touch()
    for rank in (1, 0):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
        (out := tmp_path / f"{rank}.json").touch()
        files = {"stdout": str(out), "stderr": str(errors), "before": None}
        processes.append(Forked([launched.__file__], cwd=tmp_path, env=env, **files))
    assert [process.wait(60) for process in processes] == [0, 0] and errors.read_text() == ""
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text().splitlines()[-1]) for rank in (0, 1))
    assert (zero["world"]["rank"], one["world"]["rank"]) == (0, 1)
    assert zero["world"]["origin"] == "environment"
    assert zero["sum"] == one["sum"] == 2
    # Rank 0 hosts the store, and each rank accepts its gloo peers.
    assert len(zero["listening"]) >= 2 and len(one["listening"]) >= 1
    assert all(is_loopback(address) for address in zero["listening"] + one["listening"])


@pytest.mark.parametrize(
    ("rank", "size", "here", "port_is_held", "words"),
    [
        (0, 3, 3, False, "rank 0 waited 1 s for 3 ranks: 1 came, missing: 1, 2"),
        (1, 2, 2, False, "rank 1 waited 1 s for rank 0 on 127.0.0.1:{port}"),
        (0, 2, 2, True, "MASTER_PORT={port}.*in use"),
        (0, 2, 1, False, "the 1 ranks on other machines cannot reach"),
    ],
)
def test_why_ranks_do_not_meet_is_said_in_time(port, rank, size, here, port_is_held, words):
    start = time.monotonic()
    with listen("127.0.0.1", port) if port_is_held else nullcontext():
        with pytest.raises(LaunchError, match=words.format(port=port)):
            connect(World(rank, size, rank, here, "environment"), timeout_s=1)
    assert time.monotonic() - start < 30


def test_a_rank_that_is_told_to_stop_waits_for_no_one(port, monkeypatch):
    monkeypatch.setattr(stopping, "wanted", lambda: True)
    with pytest.raises(stopping.Stopped, match="while rank 0 waited for the other ranks"):
        connect(World(0, 2, 0, 2, "environment"), timeout_s=60)
    with pytest.raises(stopping.Stopped, match="while the ranks had not met yet"):
        meeting._wait_for_listener(World(1, 2, 1, 2, "environment"), "127.0.0.1", 1, timeout_s=20)


def test_a_rank_that_torchrun_has_restarted_and_not_counted_is_told_what_counts(port, monkeypatch):
    monkeypatch.setitem(meeting._opened, f"127.0.0.1:{port}", store := HashStore())
    number = next(meeting._connections) + 1
    store.add(f"launchers/attempt-0/connection-{number}/rank-1", 1)
    with pytest.raises(LaunchError, match="RANK=1 of WORLD_SIZE=2.*several machines needs --master-addr"):
        connect(World(1, 2, 0, 1, "torchrun"), timeout_s=1)


class Counted:
    """A rank's view of a store that counts the keys for which it asks at once."""

    def __init__(self, store):
        self.store, self.most = store, 0

    def check(self, keys):
        self.most = max(self.most, len(keys))
        return self.store.check(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_many_ranks_that_meet_ask_the_store_for_one_key_each():
    store, ranks = HashStore(), 32
    views = [Counted(store) for _ in range(ranks)]

    def exchange(rank):
        return meeting._exchange(World(rank, ranks, rank, ranks, "local"), views[rank], "what", rank, 60)

    with ThreadPoolExecutor(ranks) as pool:
        assert list(pool.map(exchange, range(ranks))) == [[*range(ranks)]] * ranks
    assert [view.most for view in views] == [ranks] + [1] * (ranks - 1)
    assert 1024 / poll_s(1024) <= 2000, "requests a second"


def test_an_interface_that_the_user_chose_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"].startswith("lo")
