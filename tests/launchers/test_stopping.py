"""A process that heeds the signals to stop: the first is noted, a second one ends it at once."""

import signal
import subprocess
import time
from contextlib import suppress

import pytest

SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
# Reads lines, and answers each by whether a stop is wanted.
PROCESS = """
import sys
from launchers import stopping
{before}
stopping.install_handlers()
print("ready", flush=True)
for line in sys.stdin:
    print(stopping.wanted(), stopping.noted(), flush=True)
"""


@pytest.fixture
def process(started):
    def start(before=""):
        pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
        one = started("-c", PROCESS.format(before=before), **pipes)
        assert one.stdout.readline() == "ready\n"
        return one

    return start


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def until(process, answer, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while (given := ask(process)) != answer:
        assert time.monotonic() < deadline, f"{given}, not {answer}, for {timeout_s} s"
        time.sleep(0.01)


def test_what_comes_right_after_a_signal_is_the_same_request(process):
    one = process()
    assert ask(one) == "False None"
    for signum in SIGNALS:
        one.send_signal(signum)
    time.sleep(0.5)
    assert one.poll() is None
    assert ask(one).startswith("True")


@pytest.mark.parametrize(
    "before, signum, answer",
    [
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", signal.SIGTERM, "False None"),
        # Blocked from outside, it is a request too.
        ("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})", signal.SIGUSR2, "True None"),
    ],
)
def test_an_ignored_signal_stays_ignored_and_a_blocked_one_is_heeded(process, before, signum, answer):
    one = process(before)
    one.send_signal(signum)
    time.sleep(0.2)
    until(one, answer)


def test_where_there_is_nothing_to_save_the_first_signal_ends_the_process(process):
    one = process("stopping.at_once()")
    one.send_signal(signal.SIGUSR2)
    with suppress(BrokenPipeError):
        ask(one)  # Python may have noted the signal right before its read began, which the signal then does not end
    assert one.wait(20) == 128 + signal.SIGUSR2
