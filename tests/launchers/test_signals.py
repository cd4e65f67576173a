"""However the launching process ends, its workers end, and so does what they had started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commandline import wait_until

DRIVER = Path(__file__).with_name("driver.py")


def lives(process):
    """Whether it still runs. (A container's first process may not reap what has ended.)"""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "kind, workers, to_the_group, signum",
    [
        ("mild", 2, False, signal.SIGKILL),
        ("stubborn", 2, False, signal.SIGINT),  # the workers do not heed signals
        ("mild", 2, False, signal.SIGTERM),
        ("mild", 0, True, signal.SIGINT),  # the fork server is importing torch
    ],
)
def test_a_signal_ends_the_launching_process_and_all_that_it_has_started(tmp_path, kind, workers, to_the_group, signum):
    command, family = [sys.executable, str(DRIVER), str(tmp_path), kind], []
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    launcher = subprocess.Popen(command, start_new_session=True, **pipes)
    try:
        assert launcher.stdout.readline() == "started\n"
        # The fork server, Python's resource tracker; two workers, a child of each.
        below = lambda: psutil.Process(launcher.pid).children(recursive=True)  # noqa: E731
        ready = (lambda: len(list(tmp_path.glob("*.pids"))) == 2) if workers else below
        wait_until(ready, 60, f"{workers} workers to start")
        family = below()
        assert len(family) == 6 or not workers
        (os.killpg if to_the_group else os.kill)(launcher.pid, signum)
        output, errors = launcher.communicate(timeout=20)
        if signum == signal.SIGINT:
            assert (launcher.returncode, output, errors) == (7, f"{signum}\n", "")
        wait_until(lambda: not any(map(lives, family)), 5, f"the end of {family}")
    finally:
        for process in [*filter(lives, family), launcher]:
            process.kill()
        launcher.communicate()
