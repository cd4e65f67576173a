"""The progress line, memory and step times."""

import io
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.reporting import Progress
from training.reporting.progress import duration
from training.reporting.summary import Outcome, peak_memory_bytes


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def record(step):
    return {"step": step, "loss": 8.1234, "samples_per_s": 2.5, "tokens_per_s": 612.3}


def run(stream, steps, seconds=1.0, **options):
    clock = Clock()
    progress = Progress(steps, stream=stream, clock=clock, **options)
    for step in range(options.get("first_step", 1), steps + 1):
        clock.now += seconds
        progress.update(record(step))
    progress.close()
    return stream.getvalue()


def test_a_file_gets_the_first_and_last_step_and_otherwise_a_line_every_five_seconds():
    lines = run(io.StringIO(), 40).splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 6, 11, 16, 21, 26, 31, 36, 40]
    assert lines[0] == "step    1/40  loss 8.123  612 tokens/s"
    assert lines[2] == "step   11/40  loss 8.123  612 tokens/s  29 s left"
    assert lines[-1] == "step   40/40  loss 8.123  612 tokens/s"


def test_without_tokens_samples_are_counted():
    stream = io.StringIO()
    Progress(1, stream=stream).update({"step": 1, "loss": 8.1234, "samples_per_s": 2.5})
    assert "2.50 samples/s" in stream.getvalue()


def test_time_left_forgets_a_slow_first_step():
    clock = Clock()
    progress = Progress(100, stream=io.StringIO(), clock=clock)
    clock.now += 300
    progress.update(record(1))
    assert progress.seconds_left() is None
    for step in range(2, 11):
        clock.now += 2
        progress.update(record(step))
    assert progress.seconds_left() == pytest.approx(90 * 2)


def test_time_left_follows_a_change_of_pace():
    clock = Clock()
    progress = Progress(1000, stream=io.StringIO(), clock=clock)
    for step in range(1, 201):
        clock.now += 1 if step <= 100 else 3
        progress.update(record(step))
    assert progress.seconds_left() == pytest.approx(800 * 3)


def test_a_terminal_gets_one_bar_with_step_loss_rate_and_time_left():
    stream = Terminal()
    progress = Progress(4, stream=stream)
    for step in range(1, 5):
        time.sleep(0.11)  # tqdm draws ten times a second at most
        progress.update(record(step))
    progress.close()
    shown = stream.getvalue()
    assert "step 4/4" in shown and "loss 8.123" in shown and "612 tokens/s" in shown and "s left" in shown
    assert shown.count("\n") == 1


def test_a_resumed_run_starts_its_bar_where_it_left_off():
    shown = run(Terminal(), 50, first_step=41)
    assert "step 40/50" in shown and "step 50/50" in shown and "step 0/50" not in shown


def test_a_message_gets_a_line_of_its_own_above_the_bar():
    stream = Terminal()
    progress = Progress(10, stream=stream)
    progress.update(record(1))
    progress.say("checkpoint saved")
    progress.update(record(2))
    progress.close()
    assert "\rcheckpoint saved\n" in stream.getvalue() or "\ncheckpoint saved\n" in stream.getvalue()
    plain = io.StringIO()
    Progress(10, stream=plain).say("checkpoint saved")
    assert plain.getvalue() == "checkpoint saved\n"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_stream_that_cannot_be_written_does_not_end_training(kind):
    class Full(kind):
        def write(self, text):
            raise OSError(28, "No space left on device")

    progress = Progress(2, stream=Full())
    progress.update(record(1))
    progress.say("still here")
    progress.close()


@pytest.mark.parametrize("seconds, text", [
    (0, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (80, "1 min 20 s"), (7500, "2 h 5 min"),
    (273600, "3 d 4 h")])
def test_durations_are_told_in_two_units(seconds, text):
    assert duration(seconds) == text


def test_peak_memory_grows_with_what_was_allocated_and_does_not_fall_again():
    # In a process of its own: this one may have had a higher peak already.
    script = ("from training.reporting.summary import peak_memory_bytes as peak\nbefore = peak('cpu')\n"
              "x = bytearray(b'x') * 200_000_000\nfull = peak('cpu')\ndel x\n"
              "assert peak('cpu') > 0.99 * full\nprint(full - before)")
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).resolve().parents[2], text=True,
                          capture_output=True, check=True)
    assert 190e6 < int(done.stdout) < 260e6


def test_memory_of_an_unknown_device_is_an_error():
    with pytest.raises(ValueError, match="cpu, cuda and mps"):
        peak_memory_bytes("tpu:0")


def test_the_median_leaves_out_the_warm_up():
    assert Outcome().step_time_s is None
    seconds = Outcome().seconds
    seconds.extend((9.0, 5.0, 1.0))
    assert Outcome(seconds=seconds).step_time_s == 5.0, "too few steps to leave any out"
    seconds.append(2.0)
    assert Outcome(seconds=seconds).step_time_s == 1.5
    hundred = [7.0 if step < 10 else 1.0 if step < 55 else 2.0 for step in range(100)]
    assert Outcome(seconds=hundred).step_time_s == 1.5, "a tenth of 100 steps is warm-up"
