"""What stands on the console: a run's page, numbers, hints, colour, the progress bar; and a console that breaks."""

import io
import itertools
import os
import re
import shlex
import sys
from pathlib import Path

import commandline
import pytest
from commandline import ROOT
from composed import compose, plain
from composed import run as train_here
from hydra.core.override_parser.overrides_parser import OverridesParser

import train
from common.machine import styled
from conf.words import hydra_word
from launchers import World
from parallel.timeline import Interval
from training.reporting.console import describe_results, what_to_type
from training.reporting.progress import Progress
from training.reporting.summary import Outcome, RankResult
from training.run.prepare import prepare
from training.run.rank import _idle

FEW = ["logger=none", "device=cpu", "train.epochs=null", "train.steps=3", "train.eval_every=1"]
PAGE = Path(__file__).parent / "pages" / "pipe_ddp.txt"


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
    assert len(shown) == 8
    for of_a_step in (True, False):  # on a stream of their own
        places = [
            next((place for place, said in enumerate(page) if said.startswith(line)), line)
            for line in shown
            if line.startswith("step ") == of_a_step
        ]
        assert all(type(place) is int for place in places) and places == sorted(places), places


@pytest.mark.parametrize("name", ["a space, and (brackets)", "lr=0.1", "it's"])
def test_printed_paths_come_through_the_shell_and_hydra_as_they_are(name):
    """``lr=0.1`` is how sweeps name their directories."""
    link = f"/runs/{name}/checkpoints/latest"
    lines = what_to_type(hydra_word(link), [], ["model.hidden=20"]).splitlines()
    for line, key in zip(lines, ("checkpoint", "train.resume"), strict=True):
        overrides = OverridesParser.create().parse_overrides(shlex.split(line.partition(":")[2])[2:])
        found = {override.key_or_group: override.value() for override in overrides}
        assert (found[key], found["model.hidden"]) == (link, 20)


def test_colour_is_for_terminals_that_show_it_and_users_who_want_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert styled("x", "red", Terminal()) == "\033[1;31mx\033[0m"
    assert styled("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", "red", Terminal()) == "x"


@pytest.mark.parametrize("words, said", [(["train.steps=3"], False), (["train.steps=5"], True), ([], False)])
def test_a_run_that_its_epochs_end_before_its_steps_says_so_at_the_start(tmp_path, capsys, words, said):
    line = ["train.epochs=2", "data.samples=80", "train.global_batch_size=32", "logger=none", "device=cpu"]
    assert train.main([*line, *words, f"hydra.run.dir={tmp_path}/run"]) == 0
    shown = "train.epochs=2 ends this run after 4 steps, before train.steps=5; without that limit: train.epochs=null"
    assert (shown in capsys.readouterr().out) == said


def closed():
    os.closerange(0, 3)
    sys.stdin = sys.stdout = sys.stderr = None  # as Python does at its start


def full():
    for descriptor in (1, 2):
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)


def without_a_reader():
    reader, writer = os.pipe()
    os.close(reader)
    for descriptor in (1, 2):
        os.dup2(writer, descriptor)


@pytest.mark.parametrize("layout, console", [("single", closed), ("single", without_a_reader), ("ddp", full)])
def test_a_console_that_is_closed_or_full_changes_no_exit_code(tmp_path, layout, console):
    words = [*FEW, f"parallel={layout}", "launcher.max_restarts=1"]
    ended = commandline.train(words, tmp_path / "run", before=console)
    assert (ended.code, ended.console) == (0, "")
    assert (tmp_path / "run" / "summary.json").exists()


# -- the progress bar, memory and step times ----------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def record(step):
    return {"step": step, "loss": 8.1234, "samples_per_s": 2.5, "tokens_per_s": 612.3}


def shown(monkeypatch, stream, steps, first_step=1):
    """What a run shows, one step a second."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("training.reporting.progress.time.monotonic", itertools.count(100.0).__next__)
    progress = Progress(steps, first_step)
    for step in range(first_step, steps + 1):
        progress.update(record(step))
    monkeypatch.undo()
    progress.close()
    return stream.getvalue()


def test_a_file_gets_the_first_and_last_step_and_otherwise_a_line_every_five_seconds(monkeypatch):
    lines = shown(monkeypatch, io.StringIO(), 40).splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 6, 11, 16, 21, 26, 31, 36, 40]
    assert lines[0] == "step    1/40  loss 8.123  612 tokens/s"
    assert lines[2] == "step   11/40  loss 8.123  612 tokens/s  29 s left"
    assert lines[-1] == "step   40/40  loss 8.123  612 tokens/s"


def test_a_resumed_run_starts_its_bar_where_it_left_off(monkeypatch):
    bar = shown(monkeypatch, Terminal(), 50, first_step=41)
    assert "step 40/50" in bar and "step 50/50" in bar and "step 0/50" not in bar
    assert "loss 8.123" in bar and "612 tokens/s" in bar and bar.count("\n") == 1


def test_a_message_gets_a_line_of_its_own_above_the_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    progress = Progress(10)
    progress.update(record(1))
    progress.say("checkpoint saved")
    progress.update(record(2))
    progress.close()
    assert "\rcheckpoint saved\n" in stream.getvalue() or "\ncheckpoint saved\n" in stream.getvalue()
    monkeypatch.setattr(sys, "stderr", plain := io.StringIO())
    Progress(10).say("checkpoint saved")
    assert plain.getvalue() == "checkpoint saved\n"


def test_an_evaluation_shows_no_bar(tmp_path, monkeypatch):
    steps = ["train.epochs=null", "train.steps=2"]
    train_here(tmp_path / "run", *steps)
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    train_here(tmp_path / "eval", *steps, "mode=eval", f"checkpoint='{tmp_path}/run'")
    assert re.fullmatch(r"val_loss \S+\ntest_loss \S+\n", stream.getvalue())


def test_the_median_leaves_out_the_warm_up():
    assert Outcome().step_time_s is None
    seconds = Outcome().seconds
    seconds.extend((9.0, 5.0, 1.0))
    assert Outcome(seconds=seconds).step_time_s == 5.0, "too few steps to leave any out"
    seconds.append(2.0)
    assert Outcome(seconds=seconds).step_time_s == 1.5
    hundred = [7.0 if step < 10 else 1.0 if step < 55 else 2.0 for step in range(100)]
    assert Outcome(seconds=hundred).step_time_s == 1.5, "a tenth of 100 steps is warm-up"


@pytest.mark.parametrize("bubble, shown", [(0.24, "24.0% (ideal 20.0%)"), (0.45, "45.0% (ideal 20.0%; too few cores)")])
def test_a_bubble_far_above_the_ideal_comes_with_its_reason(bubble, shown):
    summary = dict.fromkeys(("first_loss", "best_val_loss", "test_loss", "test_accuracy", "samples_per_s"))
    speed = {"tokens_per_s": 5.0, "peak_memory_bytes": [1], "bubble_fraction": bubble, "ideal_bubble_fraction": 0.2}
    assert f"bubble {shown}" in describe_results({**summary, **speed}, Path("run"), idle="too few cores")


UNEQUAL = [
    ((3.0, 1.0), [], "the ranks compute for 3 and 1 s of a step: parallel.balance=time evens out the stages"),
    ((1.4, 1.0), [], ""),
    ((1.0, 3.0), [], ""),  # the last stage has one layer
    ((3.0, 1.0), ["parallel.balance=[2,1]"], ""),
]


@pytest.mark.parametrize("seconds, words, said", UNEQUAL)
def test_stages_that_take_unequally_long_are_the_reason_of_a_bubble(seconds, words, said):
    cfg = plain(compose("model=toy", "parallel=pipelined", "parallel.pp=2", "device=cpu", *words))
    ranks = [RankResult(0, {}, None, [[Interval("forward", n, 0, 0.0, size)]]) for n, size in enumerate(seconds)]
    assert _idle(prepare(cfg), World.alone(), ranks) == said
