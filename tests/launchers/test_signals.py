"""However the launching process ends, its workers end, and so does what they had started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

DRIVER = Path(__file__).with_name("driver.py")


def wait_until(condition, timeout_s, what):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


class Launch:
    """A launching process in a process group of its own, and all that it started."""

    def __init__(self, folder, stubborn=False):
        self.folder = folder
        command = [sys.executable, str(DRIVER), str(folder), "stubborn" if stubborn else "mild"]
        self.process = subprocess.Popen(
            command, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout.readline() == "started\n"
        self.family = []

    def see_family(self):
        """Notes the processes below the launching one: the fork server, workers, their children."""
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def wait_for_workers(self):
        wait_until(lambda: len(list(self.folder.glob("*.pids"))) == 2, 60, "two workers to start")
        self.see_family()
        # The fork server, Python's resource tracker, two workers, a child of each.
        assert len(self.family) == 6

    def living(self):
        """Who of the family still runs. (A container's first process may not reap what has ended.)"""

        def runs(process):
            try:
                return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False

        return [process for process in self.family if runs(process)]

    def ends_within(self, timeout_s):
        wait_until(lambda: not self.living(), timeout_s, f"the end of {self.living()}")
        return True

    def end(self):
        for process in [*self.family, self.process]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.process.communicate()


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(**options):
        started.append(Launch(tmp_path, **options))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_killing_the_launching_process_leaves_no_workers(launch):
    run = launch()
    run.wait_for_workers()
    run.process.kill()
    assert run.ends_within(timeout_s=5)


@pytest.mark.slow  # of a whole command, tests/training/test_cli_failures.py says it
@pytest.mark.parametrize("to_the_group", [False, True])
def test_ctrl_c_ends_all_workers_and_says_nothing(launch, to_the_group):
    run = launch()
    run.wait_for_workers()
    (os.killpg if to_the_group else os.kill)(run.process.pid, signal.SIGINT)
    output, errors = run.process.communicate(timeout=20)
    assert (run.process.returncode, output, errors) == (7, "2\n", "")
    assert run.ends_within(timeout_s=1)


def test_workers_that_do_not_heed_sigterm_are_killed(launch):
    run = launch(stubborn=True)
    run.wait_for_workers()
    run.process.terminate()
    output, _ = run.process.communicate(timeout=20)
    assert (run.process.returncode, output) == (7, "15\n")
    assert run.ends_within(timeout_s=1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_during_start_up_ends_all(launch, signum):
    run = launch()
    # The fork server, which is importing torch.
    wait_until(lambda: run.see_family() or run.family, 30, "the fork server")
    os.killpg(run.process.pid, signum)
    output, errors = run.process.communicate(timeout=20)
    assert (run.process.returncode, output, errors) == (7, f"{signum}\n", "")
    assert run.ends_within(timeout_s=1)
