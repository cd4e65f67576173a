"""Ranks that were started one by one wait for rank 0 as long as it lives, end with it, and obey nobody in its place."""

import json
import signal
import socket
import time
from functools import partial

import psutil
import pytest
from commandline import ROOT, Forked, Started, environment, free_port, wait_until
from composed import config

from conf.instantiate import to_dict

TASK = ROOT / "training" / "command" / "slurm_job.py"

TOY = ["model=toy", "train.epochs=null", "train.steps=2", "logger=none", "device=cpu", "parallel=ddp"]


def slow_data(seconds, mark=None):
    """In rank 0's process: the toy's data takes so long to prepare."""
    from data.random_regression import RandomRegression

    prepare = RandomRegression.prepare

    def slowly(self):
        if mark is not None:
            mark.touch()
        time.sleep(seconds)
        prepare(self)

    RandomRegression.prepare = slowly


def hurry():
    """In a new process: rank 0 does not wait long for one that does not read that it ends."""
    from launchers import heartbeat

    heartbeat._READ_S = 0.5


def begin(tmp_path, *words, of_rank_0=(), before=None):
    """Start two ranks as an operator of Kubernetes does; by rank. ``before`` is called in rank 0's process."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    begun = {}
    for rank, more in ((1, ()), (0, of_rank_0)):
        env = {**place, "RANK": str(rank)}
        early = None if rank else before
        begun[rank] = Started([*TOY, *words, *more], tmp_path / "run", env=env, tag=f"rank{rank}", before=early)
    return begun


def end(begun):
    try:
        return {rank: one.wait(120) for rank, one in begun.items()}
    finally:
        for one in begun.values():
            one.kill()


@pytest.mark.slow
def test_data_that_take_longer_than_the_time_out_to_prepare_end_no_run(tmp_path):
    begun = begin(tmp_path, "parallel.timeout_s=3", before=partial(slow_data, 4))
    ended = end(begun)
    assert [ended[rank].code for rank in (0, 1)] == [0, 0], "".join(one.console for one in ended.values())
    assert len(ended[0].losses) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel.chnks=2"], "chnks"),  # its composition
        (["parallel=single"], "1 processes, but 2 were started"),  # the layout
        (["-m", "parallel.chunks=1,2"], "without torchrun"),  # a sweep
    ],
)
def test_where_rank_0_refuses_the_others_end_with_it_at_once_and_say_why(tmp_path, words, said):
    begun = begin(tmp_path, *words)
    begun[0].process.wait(120)
    first = time.monotonic()
    begun[1].process.wait(120)
    assert time.monotonic() - first < 5
    ended = end(begun)
    assert [ended[rank].code for rank in (0, 1)] == [1, 1]
    assert said in ended[0].stderr and ended[0].stderr.count("error:") == 1
    assert "rank 0 (" in ended[1].stderr and said in ended[1].stderr and ended[1].stderr.count("error:") == 1
    assert "the store where" not in ended[1].stderr


@pytest.mark.parametrize("told", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_rank_that_is_told_to_stop_while_rank_0_prepares_stops_all(tmp_path, told):
    mark = tmp_path / "preparing"
    begun = begin(tmp_path, before=partial(slow_data, 1, mark))
    wait_until(mark.exists, 60, "rank 0")
    begun[told].process.send_signal(signal.SIGTERM)
    ended = end(begun)
    assert [ended[rank].code for rank in (0, 1)] == [75, 75], "".join(one.console for one in ended.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "words", "refused"),
    [
        (3, ["parallel.comm_hook=hierarchical"], True),
        (1, ["parallel.comm_hook=hierarchical"], True),
        (1, ["parallel=hsdp"], True),
        (3, ["parallel.comm_hook=hierarchical", "parallel.shard=2"], False),
    ],
)
def test_nodes_with_different_numbers_of_ranks_are_refused_where_their_groups_must_be_equal(
    tmp_path, first, words, refused
):
    interfaces = psutil.net_if_addrs().values()
    known = [one.address for interface in interfaces for one in interface if one.family == socket.AF_INET]
    if not (address := next((one for one in known if not one.startswith("127.")), None)):
        pytest.skip("needs an address other than that of the loopback interface")
    place = {"WORLD_SIZE": "4", "MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    begun = {}
    for rank in range(4):
        local_rank, size = (rank, first) if rank < first else (rank - first, 4 - first)
        env = {**place, "RANK": str(rank), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(size)}
        begun[rank] = Started([*TOY, *words], tmp_path / "run", env=env, tag=f"rank{rank}")
    ended = end(begun)
    assert [one.code for one in ended.values()] == 4 * [int(refused)], "".join(one.console for one in ended.values())
    assert ("the nodes have different numbers of ranks" in ended[0].stderr) == refused


def test_a_mode_without_a_run_ends_all_ranks(tmp_path):
    begun = begin(tmp_path, "mode=plan")
    ended = end(begun)
    assert [ended[rank].code for rank in (0, 1)] == [0, 0] and ended[1].console == ""


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [([], 0), (["optim.lr=-1"], 1)])
def test_so_it_is_with_the_tasks_of_a_job(tmp_path, words, code):
    tree = to_dict(config(*TOY, "launcher=slurm", "parallel.timeout_s=3", *words))
    (tmp_path / "run").mkdir()
    (tmp_path / "run_a_0.json").write_text(json.dumps({"cfg": tree, "run_dir": str(tmp_path / "run")}))
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    tasks, said = [], []
    for rank in ("1", "0"):
        said.append(tmp_path / f"said-{rank}")
        said[-1].touch()
        place = {"cwd": tmp_path, "env": environment({**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})}
        output = {"stdout": str(said[-1]), "stderr": str(said[-1])}
        before = partial(slow_data, 4) if rank == "0" else None
        tasks.append(Forked([str(TASK), str(tmp_path), "a"], **place, **output, before=before))
    try:
        codes = [task.wait(100) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert codes == [code, code], "".join(path.read_text() for path in said)
    reports = [json.loads((tmp_path / f"7_{rank}.json").read_text()) for rank in range(2)]
    assert [report.get("peer") for report in reports] == ([None, None] if code == 0 else [False, True])


def test_a_false_rank_0_has_no_program_executed_on_another(tmp_path):
    """By variables of which git makes a configuration; on its own machine it may, but git does not heed them."""
    (program := tmp_path / "program").write_text(f"#!/bin/sh\ntouch {tmp_path}/executed-$RANK\n")
    program.chmod(0o755)
    git = f"{{GIT_CONFIG_COUNT: 1, GIT_CONFIG_KEY_0: core.fsmonitor, GIT_CONFIG_VALUE_0: {program}}}"
    begun = begin(tmp_path, of_rank_0=[f"parallel.env={git}"], before=hurry)
    ended = end(begun)
    assert not list(tmp_path.glob("executed*"))
    assert [ended[rank].code for rank in (0, 1)] == [1, 1]
    keys = "parallel.env.GIT_CONFIG_COUNT, parallel.env.GIT_CONFIG_KEY_0, parallel.env.GIT_CONFIG_VALUE_0"
    assert f"rank 0 sends {keys}, which the command line of this rank does not name" in ended[1].stderr
    assert "rank 1 (" in ended[0].stderr and "its output says why" in ended[0].stderr
