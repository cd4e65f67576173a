"""A rank that neither moves nor dies: named within parallel.timeout_s, and the run ends with all its processes."""

import os
import signal

import pytest
from commandline import wait_until

TIMEOUT_S = 6
# The others have waited, 4 s until all have said so, 15 more where some began to wait much later.
END_S = TIMEOUT_S + 40


@pytest.mark.parametrize(
    "layout, rank",
    [
        ("pipelined", 1),
        pytest.param("ddp", 0, marks=pytest.mark.slow),
        pytest.param("pipelined", 0, marks=pytest.mark.slow),
        pytest.param("pipe_ddp", 2, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_stopped_is_named_and_the_run_ends(start, layout, rank):
    run = start(f"parallel={layout}", f"parallel.timeout_s={TIMEOUT_S}")
    stopped = run.workers()[rank]
    os.kill(stopped.pid, signal.SIGSTOP)
    ended = run.wait(END_S)
    assert ended.code == 1
    assert f"error: rank {rank} has not moved since step " in ended.stderr
    assert f"(parallel.timeout_s={TIMEOUT_S})" in ended.stderr
    assert f"process {stopped.pid} was stopped, as by SIGSTOP" in ended.stderr
    assert "Traceback" not in ended.console, "what the others saw of it is not the cause"
    wait_until(lambda: not run.family(), 10, f"the end of {run.family()}")
    assert not (run.folder / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_so_it_is_among_ranks_that_torchrun_has_started(start, rank):
    # Here rank 1 waits for rank 0's preparations, too.
    patient = f"parallel.timeout_s={5 * TIMEOUT_S}"
    run = start("parallel=ddp", patient, prefix=["-m", "torch.distributed.run", "--nproc-per-node", "2"])
    ranks = run.launched()
    os.kill(ranks[rank].pid, signal.SIGSTOP)
    ended = run.wait(5 * TIMEOUT_S + END_S + 60)  # torchrun gives the stopped rank 30 s
    assert ended.code != 0
    assert f"error: rank {rank} (" in ended.stderr and "has not moved since step " in ended.stderr
    wait_until(lambda: not any(process.is_running() for process in ranks), 10, f"the end of {ranks}")
