"""Who a process is, by its environment."""

import subprocess
import sys

import pytest

from launchers import LaunchError, World

TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_without_rank_and_world_size_there_is_no_world_to_join():
    assert World.detect({"MASTER_ADDR": "127.0.0.1"}) is None


def test_local_ranks_need_not_be_given_on_one_machine():
    for host in ("127.0.0.1", "localhost", "::1"):
        assert World.detect({**TWO, "MASTER_ADDR": host}) == World(1, 2, 1, 2, "environment")


def test_a_pod_holds_one_rank_where_nobody_says_more():
    pod = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
    assert World.detect(pod) == World(1, 4, 0, 1, "environment")


def test_torchrun_is_told_from_variables_set_by_hand():
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world = World.detect({**TWO, **local, "MASTER_ADDR": "node1", "TORCHELASTIC_RUN_ID": "x"})
    assert world == World(1, 2, 0, 1, "torchrun")


def test_a_single_rank_needs_no_address():
    assert World.detect({"RANK": "0", "WORLD_SIZE": "1"}) == World(0, 1, 0, 1, "environment")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set, though RANK=1"),
        ({"RANK": ""}, "RANK is not set, though WORLD_SIZE=2"),
        ({"RANK": "2"}, "RANK=2 does not fit WORLD_SIZE=2: ranks go from 0 to 1"),
        ({"RANK": "-1"}, "RANK=-1 does not fit"),
        ({"RANK": "one"}, "RANK='one' is not an integer"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0: a run has at least 1"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({"MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is not set"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 does not fit LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4 is more than WORLD_SIZE=2"),
    ],
)
def test_what_is_missing_or_does_not_fit_is_named(change, message):
    with pytest.raises(LaunchError, match=message):
        World.detect({**TWO, **change})


def test_importing_launchers_does_not_import_torch():
    code = "import sys, launchers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
