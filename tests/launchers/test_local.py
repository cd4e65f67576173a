"""Workers on this machine: that they meet, how they fail, and that none is left."""

import json
import re
import subprocess
import sys
import time

import launched
import psutil
import pytest

from common.machine import changed_environment
from launchers import WorkerFailed, run_workers
from launchers.world import is_loopback


@pytest.fixture(autouse=True)
def no_worker_is_left():
    of_the_tests = {child.pid for child in psutil.Process().children()}
    yield
    left = psutil.Process().children(recursive=True)
    assert [child for child in left if child.pid not in of_the_tests and not _is_of_the_tests(child)] == []


def _is_of_the_tests(process: psutil.Process) -> bool:
    """Whether it is Python's own helper of the tests, or has ended."""
    try:
        return "from multiprocessing." in " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return True


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    folder = tmp_path_factory.mktemp("met")
    with changed_environment({"OMP_NUM_THREADS": "1"}):
        run_workers(launched.meet, (str(folder),), 2, folder / "logs")
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_workers_have_ranks_of_their_own_and_sum_over_gloo(met):
    _, seen = met
    assert [w["world"]["rank"] for w in seen] == [w["world"]["local_rank"] for w in seen] == [0, 1]
    assert {w["world"]["size"] for w in seen} == {w["world"]["local_size"] for w in seen} == {2}
    assert {w["world"]["origin"] for w in seen} == {"local"}
    assert [w["sum"] for w in seen] == [21, 21]


def test_only_loopback_sockets_listen(met):
    for rank in met[1]:
        (address,) = rank["listening"]  # gloo's; the ranks meet in a file
        assert is_loopback(address)


def test_workers_see_the_given_environment_and_do_not_run_the_parents_script(met):
    assert [w["threads"] for w in met[1]] == ["1", "1"]
    assert [w["main"] for w in met[1]] == [None, None]


def test_ranks_other_than_0_write_to_their_log_files(met):
    logs = met[0] / "logs"
    assert [path.name for path in logs.iterdir()] == ["rank_0001.log"]
    assert set((logs / "rank_0001.log").read_text().splitlines()) == {
        "python output of rank 1",
        "native output of rank 1",
    }


@pytest.mark.parametrize(
    ("entry", "args", "timeout_s", "rank", "kind", "words"),
    [
        (launched.raise_on, (0,), None, 0, "exception", "Traceback.*in raise_on.*ValueError: bad luck on 0\n$"),
        (launched.raise_on, (1,), None, 1, "exception", "Traceback.*in raise_on.*ValueError: bad luck on 1\n$"),
        # A lost connection is not taken for the cause, nor is that which NCCL's watchdog makes of a stall.
        (launched.wrap_lost_peer, (), None, 1, "exception", "ValueError: the first error"),
        (launched.abort, (1, 2.5, 2.0), 2.0, 0, "stall", r"rank 0 has not moved since step 3 for.*"
         r"rank 0 stands here \(most recent call first\):\n[^\n]*launched.py\", line \d+ in abort"),
        (launched.abort, (1, 0.0, 300.0), 300.0, 1, "signal", r"rank 1 was killed by signal 6 \(SIGABRT\)"),
        (launched.killed, (), None, 1, "signal",
         r"rank 1 was killed by signal 9 \(SIGKILL\).*out of memory.*last words$"),
        (launched.leave_silently, (0,), None, 1, "exit", "rank 1 left with exit code 0.*last words$"),
        (launched.leave_silently, (3,), None, 1, "exit", "rank 1 left with exit code 3.*last words$"),
    ],
)  # fmt: skip
def test_the_rank_that_failed_first_is_named_soon(tmp_path, capfd, entry, args, timeout_s, rank, kind, words):
    start = time.monotonic()
    with pytest.raises(WorkerFailed) as failed:
        run_workers(entry, args, 2, tmp_path, timeout_s=timeout_s)
    assert time.monotonic() - start < 40
    assert (failed.value.rank, failed.value.kind) == (rank, kind)
    assert re.search(words, failed.value.text, re.DOTALL), failed.value.text
    assert kind != "exception" or "".join(capfd.readouterr()) == "", "the traceback is in the error alone"


def test_with_restarts_a_failed_group_starts_anew(tmp_path):
    run_workers(launched.fail_once, (str(tmp_path),), 2, tmp_path / "logs", max_restarts=1)
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]


def test_a_thread_left_behind_does_not_hold_up_the_run(tmp_path):
    start = time.monotonic()
    run_workers(launched.return_with_thread_running, (), 2, tmp_path)
    assert time.monotonic() - start < 60


def test_workers_do_not_run_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import launched; from launchers import local; print('once')\n"
        f"local.run_workers(launched.meet, ({str(tmp_path)!r},), 2, {str(tmp_path / 'logs')!r})"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("once") == 1
    assert [json.loads((tmp_path / f"{rank}.json").read_text())["sum"] for rank in range(2)] == [21, 21]
