"""Workers on this machine: that they meet, how they fail, and that none is left."""

import json
import multiprocessing
import os
import re
import tempfile
import time
from multiprocessing import forkserver

import launched
import psutil
import pytest
from interpreters import python

from common.errors import LaunchError
from common.machine import changed_environment
from launchers import WorkerFailed, run_workers, start_fork_server
from launchers.world import is_loopback


@pytest.fixture(autouse=True)
def no_worker_is_left():
    of_the_tests = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = psutil.Process().children(recursive=True)
    assert [child for child in left if child.pid not in of_the_tests and not _is_of_the_tests(child)] == []


def _is_of_the_tests(process: psutil.Process) -> bool:
    """Whether it is Python's own helper of the tests, or has ended."""
    try:
        return "from multiprocessing." in " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return True


def test_workers_have_ranks_and_logs_of_their_own_and_meet_over_loopback(tmp_path):
    with changed_environment({"OMP_NUM_THREADS": "1"}):
        run_workers(launched.meet, (str(tmp_path),), 2, tmp_path / "logs")
    for rank in range(2):
        one = json.loads((tmp_path / f"{rank}.json").read_text())
        world = {"rank": rank, "local_rank": rank, "size": 2, "local_size": 2, "origin": "local"}
        assert one["world"].items() >= world.items()
        (address,) = one["listening"]  # gloo's; the ranks meet in a file
        assert is_loopback(address)
        assert (one["sum"], one["threads"], one["main"]) == (21, "1", None), "the given environment, no script"
    (log,) = (tmp_path / "logs").iterdir()
    assert log.name == "rank_0001.log"
    assert set(log.read_text().splitlines()) == {"python output of rank 1", "native output of rank 1"}


@pytest.mark.parametrize(
    ("entry", "args", "timeout_s", "rank", "kind", "words"),
    [
        (launched.raise_on, (1,), 300.0, 1, "exception", "Traceback.*in raise_on.*ValueError: bad luck on 1\n$"),
        # What NCCL's watchdog makes of a stall is not taken for the cause.
        (launched.abort, (1, 2.5, 2.0), 2.0, 0, "stall", r"rank 0 has not moved since step 3 for.*"
         r"rank 0 is at \(most recent call first\):\n[^\n]*launched.py\", line \d+ in abort"),
        (launched.abort, (1, 0.0, 300.0), 300.0, 1, "signal", r"rank 1 was killed by signal 6 \(SIGABRT\)"),
        (launched.killed, (), 300.0, 1, "signal",
         r"rank 1 was killed by signal 9 \(SIGKILL\).*out of memory.*last words$"),
        (launched.leave_silently, (0,), 300.0, 1, "exit", "rank 1 ended with exit code 0.*last words$"),
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


def test_a_folder_for_temporary_files_with_too_long_a_path_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", long := str(tmp_path / ("a" * 90)))
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", None)
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_alive_fd", None)
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)
    os.mkdir(long)
    with pytest.raises(LaunchError, match="a{90}, is too long for the socket.*set TMPDIR"):
        start_fork_server()


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
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("once") == 1
    assert [json.loads((tmp_path / f"{rank}.json").read_text())["sum"] for rank in range(2)] == [21, 21]
