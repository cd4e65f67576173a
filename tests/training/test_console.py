"""What stands on the console: a run's page, numbers, hints, colour, the progress bar; and a console that breaks."""

import errno
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from commandline import ROOT, TRAIN, environment
from hydra.core.override_parser.overrides_parser import OverridesParser

import train
from common.machine import styled
from conf.composition import hydra_word
from training.reporting.console import describe_results, number, numbers, what_to_type
from training.reporting.recorder import Progress, duration
from training.reporting.summary import Outcome

FEW = ["logger=none", "device=cpu", "train.epochs=null", "train.steps=3", "train.eval_every=1"]
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
PAGE = Path(__file__).parent / "pages" / "pipe_ddp.txt"
SPEED = "1,234 tokens/s   peak memory 2.00 GiB over all ranks"


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


def blanked(page: str) -> str:
    """A page without what differs from machine to machine: numbers, paths, where lines break, why a bubble is large."""
    page = re.sub(r"(?<=[ =])/[^\s,]+", "PATH", page)
    page = re.sub(r"\d(?:[\d,.]*\d)?", "#", page)
    page = re.sub(r"(?<=ideal #%); [^)]*", "", page)
    head, blank, rest = page.partition("\n\n")
    return re.sub(r" {2,}", "  ", " ".join(head.split()) + blank + rest)


def test_a_run_prints_this_page(cli):
    run = cli("parallel=pipe_ddp", "parallel.chunks=4")  # as test_cli_models has it: the run is shared
    # A slow machine also shows the steps in between.
    shown = [line for line in run.stderr.splitlines() if not re.match(r"step +[234]/5", line)]
    page = blanked("\n".join([run.stdout.rstrip(), "-" * 20, *shown])) + "\n"
    assert page == PAGE.read_text()
    for key in ("first_loss", "final_loss", "best_val_loss", "test_loss"):
        assert f"{run.summary[key]:.3f}" in run.stdout
    for stage in run.summary["stages"]:
        assert f" {stage['parameters']:,}  {stage['layers'][0]} … {stage['layers'][-1]} (4 layers)" in run.stdout


def test_the_lines_that_the_readme_shows_are_of_that_page_in_its_order():
    (sample,) = re.findall(r"^```\n(gpt2: .*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    sample = re.sub(r"a sample of its text:\n(?:  .*\n)+|^(?:…|data: .*)\n", "", sample, flags=re.MULTILINE)
    sample = re.sub(r"outputs/\S+", "/run", sample)
    page, shown = PAGE.read_text().splitlines(), blanked("\n\n" + sample).strip().splitlines()
    assert len(shown) >= 10
    for of_a_step in (True, False):  # on a stream of their own
        places = [
            next((place for place, said in enumerate(page) if said.startswith(line)), line)
            for line in shown
            if line.startswith("step ") == of_a_step
        ]
        assert all(type(place) is int for place in places) and places == sorted(places), places


def test_numbers_have_one_format_everywhere():
    assert number("loss", 10.98765) == "10.988" and number("val_loss", 0.0123456) == "0.01235"
    assert number("test_accuracy", 0.97) == "97.00%"
    assert number("val_perplexity", 52.1) == "52.1" and number("tokens_per_s", 12345.6) == "12,346"
    assert numbers({"val_loss": 4.0, "val_perplexity": 54.6}, "2 of 73 batches") == (
        "val_loss 4.000  val_perplexity 54.6  (2 of 73 batches)"
    )


@pytest.mark.parametrize(
    "changes, options, line",
    [
        ({}, {}, "trained 20 steps: loss 10.988 -> 5.988"),
        ({"skipped_steps": 19}, {}, "trained 20 steps, 19 of them skipped: loss 10.988 -> 5.988"),
        ({}, {"extents": {"test": "2 of 73 batches"}}, "test loss 6.000 (2 of 73 batches)"),
        ({}, {}, SPEED + "   bubble 24.0% (ideal 20.0%)"),
        ({"bubble_fraction": None}, {}, SPEED),
        ({}, {}, "files: /runs/a"),
    ],
)
def test_results_have_a_line_each(changes, options, line):
    assert line in describe_results({**SUMMARY, **changes}, Path("/runs/a"), **options).splitlines()


@pytest.mark.parametrize("name", ["a space, and (brackets)", "lr=0.1", "it's"])
def test_printed_paths_come_through_the_shell_and_hydra_as_they_are(name):
    """``lr=0.1`` is how sweeps name their directories."""
    link = f"/runs/{name}/checkpoints/latest"
    lines = what_to_type(hydra_word(link), [], ["model.hidden=20"]).splitlines()
    for line, key in zip(lines, ("checkpoint", "train.resume"), strict=True):
        overrides = OverridesParser.create().parse_overrides(shlex.split(line.partition(":")[2])[2:])
        found = {override.key_or_group: override.value() for override in overrides}
        assert (found[key], found["model.hidden"]) == (link, 20)


def test_a_terminal_of_some_width_gets_a_bar_and_one_of_none_gets_lines(terminal):
    for columns, bar in ((100, True), (0, False)):
        stream, shown = terminal(columns)
        progress = Progress(3, stream=stream)
        progress.update({"step": 1, "loss": 2.0, "samples_per_s": 5.0})
        progress.close()
        stream.flush()
        text = shown()
        assert ("|" in text) == bar and (bar or "5.00 samples/s" in text), "without tokens samples are counted"


def test_colour_is_for_terminals_that_show_it_and_users_who_want_it(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream, _ = terminal(80)
    assert styled("x", "red", stream) == "\033[1;31mx\033[0m"
    assert styled("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", "red", stream) == "x"


def test_the_start_shows_what_was_typed_or_all_of_it(tmp_path, capsys):
    line = ["debug=limit", "data.samples=99", "logger=none", "device=cpu"]
    assert train.main([*line, f"hydra.run.dir={tmp_path}/short"]) == 0
    shown = capsys.readouterr().out.split()
    assert {"model=toy", "debug=limit", "data.samples=99"} <= set(shown)
    assert "seed=1337" not in shown
    assert train.main([*line, "print_config=true", f"hydra.run.dir={tmp_path}/long"]) == 0
    assert "seed: 1337" in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(ROOT / "train.py"), "--cfg", "job"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment(), timeout=200)
    os.close(writer)
    assert done.stderr == ""


class Broken:
    """Standard output whose reader is gone."""

    encoding = "utf-8"

    def write(self, text=""):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    flush = write

    def isatty(self):
        return False


def test_a_run_without_a_reader_finishes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Broken())
    monkeypatch.setattr(sys, "stderr", Broken())
    assert train.main([*FEW, f"hydra.run.dir={tmp_path}/run"]) == 0
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    "layout, console",
    [
        pytest.param("single", ">&- 2>&- <&-", id="all descriptors closed", marks=pytest.mark.slow),
        pytest.param("ddp", ">/dev/full 2>&1", id="a full disk under all ranks"),
    ],
)
def test_a_console_that_is_closed_or_full_changes_no_exit_code(tmp_path, layout, console):
    words = [*FEW, f"parallel={layout}", "launcher.max_restarts=1", f"hydra.run.dir={tmp_path}/run"]
    script = f'"$0" "$@" {console}'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, str(TRAIN), *words],
        cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "summary.json").exists()


# -- the progress bar, memory and step times ----------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "total, seconds, left", [(100, [300] + [2] * 9, 90 * 2), (1000, [1] * 100 + [3] * 100, 800 * 3)]
)
def test_time_left_forgets_a_slow_first_step_and_follows_a_change_of_pace(total, seconds, left):
    clock = Clock()
    progress = Progress(total, stream=io.StringIO(), clock=clock)
    for step, duration_of_step in enumerate(seconds, 1):
        clock.now += duration_of_step
        progress.update(record(step))
        assert (progress.seconds_left() is None) == (step == 1)
    assert progress.seconds_left() == pytest.approx(left)


def test_a_resumed_run_starts_its_bar_where_it_left_off():
    shown = run(Terminal(), 50, first_step=41)
    assert "step 40/50" in shown and "step 50/50" in shown and "step 0/50" not in shown
    assert "loss 8.123" in shown and "612 tokens/s" in shown and shown.count("\n") == 1


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


def test_durations_are_told_in_two_units():
    told = {59.4: "59 s", 59.6: "1 min 0 s", 7500: "2 h 5 min", 273600: "3 d 4 h"}
    assert {seconds: duration(seconds) for seconds in told} == told


def test_peak_memory_grows_with_what_was_allocated_and_does_not_fall_again():
    # In a process of its own: this one may have had a higher peak already.
    script = (
        "from training.reporting.summary import peak_memory_bytes as peak\nbefore = peak('cpu')\n"
        "x = bytearray(b'x') * 200_000_000\nfull = peak('cpu')\ndel x\n"
        "assert peak('cpu') > 0.99 * full\nprint(full - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=True)
    assert 190e6 < int(done.stdout) < 260e6


def test_the_median_leaves_out_the_warm_up():
    assert Outcome().step_time_s is None
    seconds = Outcome().seconds
    seconds.extend((9.0, 5.0, 1.0))
    assert Outcome(seconds=seconds).step_time_s == 5.0, "too few steps to leave any out"
    seconds.append(2.0)
    assert Outcome(seconds=seconds).step_time_s == 1.5
    hundred = [7.0 if step < 10 else 1.0 if step < 55 else 2.0 for step in range(100)]
    assert Outcome(seconds=hundred).step_time_s == 1.5, "a tenth of 100 steps is warm-up"
