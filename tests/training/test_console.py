"""What stands on the console: the configuration's differences, one format of numbers, hints, colour, and pipes."""

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from commandline import ROOT, environment

import train
from common.machine import styled
from training.reporting.console import describe_configuration, final_words, number, numbers, why_idle
from training.reporting.progress import Progress

SUMMARY = {
    "steps": 20,
    "skipped_steps": 0,
    "first_loss": 10.98765,
    "final_loss": 5.98765,
    "best_val_loss": 0.0123456,
    "test_loss": 6.0,
    "tokens_per_s": 1234.5,
    "samples_per_s": 12.0,
    "peak_memory_bytes": [2**30, 2**30],
    "bubble_fraction": 0.24,
    "ideal_bubble_fraction": 0.2,
}


def words(changes=None, link=None, **options) -> str:
    return final_words({**SUMMARY, **(changes or {})}, Path("/runs/a"), [], link, **options)


@pytest.fixture
def terminal():
    """``terminal(columns)``: a stream to a terminal of that width, and a function that reads what it shows."""
    opened = []

    def make(columns):
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        stream = os.fdopen(writer, "w")
        opened.extend((stream, os.fdopen(reader, "rb", buffering=0)))
        return stream, lambda: os.read(reader, 1 << 16).decode()

    yield make
    for stream in opened:
        stream.close()


def test_numbers_have_one_format_everywhere():
    assert number("loss", 10.98765) == "10.988" and number("val_loss", 0.0123456) == "0.01235"
    assert number("test_accuracy", 0.97) == "97.00%"
    assert number("val_perplexity", 52.1) == "52.1" and number("tokens_per_s", 12345.6) == "12,346"
    assert numbers({"val_loss": 4.0, "val_perplexity": 54.6}, "2 of 73 batches") == (
        "val_loss 4.000  val_perplexity 54.6  (2 of 73 batches)"
    )


def test_the_last_words_say_how_much_of_a_split_a_result_is_about():
    said = words(extents={"test": "2 of 73 batches"})
    assert "best validation loss 0.01235\n" in said and "test loss 6.000 (2 of 73 batches)" in said
    assert "trained 20 steps: loss 10.988 -> 5.988" in said


def test_the_last_words_say_how_many_steps_did_not_count():
    assert "trained 20 steps, 19 of them skipped: loss 10.988 -> 5.988" in words({"skipped_steps": 19})


def test_a_bubble_far_above_the_ideal_says_why_where_that_is_known():
    uneven = why_idle([1.0, 2.5], uniform=True, processes=2, cores=2)
    assert uneven == "one stage takes 2.5 times as long as another: parallel.balance=time evens them out"
    assert f"bubble 45.0% (ideal 20.0%; {uneven})" in words({"bubble_fraction": 0.45}, idle=uneven)
    assert uneven not in words(idle=uneven) and uneven not in words({"bubble_fraction": None}, idle=uneven)
    assert "bubble 45.0% (ideal 20.0%)" in words({"bubble_fraction": 0.45})
    assert why_idle([1.0, 2.5], uniform=False, processes=2, cores=2) == "", "it is the user's own balance"
    assert why_idle([1.0, 1.1], uniform=True, processes=2, cores=None) == ""
    crowded = why_idle([1.0, 2.5], uniform=True, processes=4, cores=2)
    assert crowded == "4 processes take turns on 2 cores"


def test_what_to_type_next_is_python_for_a_python_program():
    shown = final_words(SUMMARY, Path("/runs/a"), ["parallel=ddp"], "/runs/a", python=True)
    assert 'evaluate: training.train("mode=eval", "checkpoint=/runs/a", "parallel=ddp")' in shown
    assert "python train.py" not in shown and "python train.py mode=eval" in words(link="/runs/a")


def test_a_long_list_of_differences_is_wrapped_between_words():
    lines = describe_configuration({"model": "gpt2"}, [f"train.key_{i}=some-value" for i in range(20)]).splitlines()
    assert lines[0] == "model=gpt2" and len(lines) > 2 and max(map(len, lines)) <= 120
    assert all("train.key_" in word for line in lines[1:] for word in line.split())


def test_a_terminal_of_some_width_gets_a_bar_and_one_of_none_gets_lines(terminal):
    for columns, bar in ((100, True), (0, False)):
        stream, shown = terminal(columns)
        progress = Progress(3, stream=stream)
        progress.update({"step": 1, "loss": 2.0, "samples_per_s": 5.0})
        progress.close()
        stream.flush()
        assert ("|" in shown()) == bar


def test_colour_is_for_terminals_that_show_it_and_users_who_want_it(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream, _ = terminal(80)
    assert styled("x", "red", stream) == "\033[1;31mx\033[0m"
    assert styled("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", "red", stream) == "x"


def test_a_key_where_any_may_stand_can_be_added(tmp_path, capsys):
    line = ["+parallel.env.NCCL_DEBUG=INFO", "mode=plan", f"hydra.run.dir={tmp_path}/run"]
    assert train.main(["parallel.env={NCCL_ALGO: Ring}", *line]) == 0, capsys.readouterr().err


def test_the_start_shows_what_differs_from_the_defaults_or_all_of_it(tmp_path, capsys):
    line = ["debug=limit", "data.samples=99", "logger=none", "device=cpu"]
    assert train.main([*line, f"hydra.run.dir={tmp_path}/short"]) == 0
    shown = capsys.readouterr().out.split()
    assert {"model=toy", "debug=limit", "data.samples=99"} <= set(shown)
    assert "seed=1337" not in shown
    assert train.main([*line, "print_config=true", f"hydra.run.dir={tmp_path}/long"]) == 0
    assert "seed: 1337" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"]])
def test_a_reader_that_leaves_early_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), timeout=200)
    os.close(writer)
    assert done.stderr == ""
