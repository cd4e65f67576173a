"""The table and the figures of a sweep, read from the files of its jobs."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from composed import compose
from omegaconf import open_dict
from sweep_jobs import chunk_sweep, leave

from training.sweep.figure import ideal_times, loss_figure, numeric_axis, score_figure
from training.sweep.report import SweepReport, results
from training.sweep.table import read_table, write_csv


def test_the_csv_has_a_row_per_job_in_order_with_overrides_and_results(tmp_path):
    write_csv(read_table(chunk_sweep(tmp_path)), tmp_path / "sweep.csv")
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert [row["job"] for row in rows] == [str(num) for num in range(9)]
    assert [row["parallel.chunks"] for row in rows] == "1 2 3 5 6 10 12 20 30".split()
    assert {row["model"] for row in rows} == {"resnet50"}
    assert [row["status"] for row in rows] == ["finished", "failed", *["finished"] * 7]
    best = rows[6]
    assert float(best["step_time_s"]) == pytest.approx(2.9)
    assert 2.7 < float(best["step_time_p10_s"]) < 2.9 < float(best["step_time_p90_s"]) < 3.1
    assert int(best["peak_memory_bytes_max"]) == 3 << 30 and int(best["peak_memory_bytes_sum"]) == 5 << 30
    assert rows[1]["error"] == "TrainingError: no memory <left> &" and rows[1]["step_time_s"] == ""


def test_the_fastest_job_of_each_model_is_the_best(tmp_path):
    for num, (model, seconds) in enumerate([("toy", 2.0), ("toy", 1.0), ("gpt2", 9.0), ("gpt2", 8.0)]):
        leave(tmp_path, num, f"model={model}", f"parallel.pp={num % 2}", times=[seconds] * 6, model=model)
    assert [row.job.num for row in read_table(tmp_path).best] == [1, 3]


def test_the_best_job_comes_with_the_command_that_runs_it_again(tmp_path):
    for num, rate in enumerate(("0.1", "0.2")):
        leave(tmp_path, num, "model=toy", f"optim.lr={rate}", "train.resume=auto", times=[1.0 + num] * 6)
    said = "\n".join(results(read_table(tmp_path)))
    assert "The same again: python train.py model=toy optim.lr=0.1\n" in f"{said}\n"


def test_a_job_that_skipped_steps_is_not_simply_finished(tmp_path):
    folder = leave(tmp_path, 0, "seed=1", times=[1.0] * 6)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "steps": 6, "skipped_steps": 5}))
    assert read_table(tmp_path).rows[0].status == "finished, 5 of 6 steps skipped"


def test_the_first_steps_do_not_count(tmp_path):
    leave(tmp_path, 0, "seed=1", times=[50.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    (row,) = read_table(tmp_path).rows
    assert row.times.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "status, error, shown",
    [
        ("waiting", None, "not started"),
        ("running", None, "no end is recorded"),
        ("interrupted", None, ""),
        ("failed", "10 cannot be cut\ninto 3", "10 cannot be cut"),
        ("failed", "rank 1 raised\nTraceback (most recent call last):\n  x\nKeyError: 'a'\nin step 3", "KeyError: 'a'"),
    ],
)
def test_a_job_without_result_says_why_in_a_line(tmp_path, status, error, shown):
    leave(tmp_path, 0, "seed=1", status=status, error=error)
    assert read_table(tmp_path).rows[0].problem == shown


def test_the_ideal_curve_follows_the_bubble_and_no_job_is_below_it(tmp_path):
    rows = read_table(chunk_sweep(tmp_path)).scored
    chunks = np.array([float(row.values["parallel.chunks"]) for row in rows])
    ideal = np.array(ideal_times(rows))
    assert ideal / ideal[0] == pytest.approx((chunks + 1) / chunks / 2)  # (m + p - 1) / m with two stages
    above = np.array([row.score for row in rows]) / ideal
    assert above.min() == pytest.approx(1) and (above > 1 - 1e-9).all()


def test_the_figure_shows_spread_best_and_ideal(tmp_path):
    figure = score_figure(read_table(chunk_sweep(tmp_path)))
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert set(labels) == {"measured", "ideal", "best: parallel.chunks=12, 2.9 s"}
    (axes,) = figure.axes
    assert axes.get_xlabel() == "parallel.chunks" and axes.get_ylabel() == "time per step (s)"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == "1 3 5 6 10 12 20 30".split()


def test_words_are_bars_numbers_an_axis_with_a_curve_for_each_word_and_seeds_neither(tmp_path):
    for num, (strategy, dp) in enumerate([("ddp", 1), ("ddp", 2), ("pipe_ddp", 1), ("pipe_ddp", 2)]):
        leave(tmp_path, num, f"parallel={strategy}", f"parallel.dp={dp}", f"seed={num}", times=[1.0] * 6)
    table = replace(read_table(tmp_path), keys=["parallel", "parallel.dp"])
    assert numeric_axis(table) == "parallel.dp"
    labels = [text.get_text() for text in score_figure(table).legends[0].get_texts()]
    assert {"parallel=ddp", "parallel=pipe_ddp"} <= set(labels)
    table = replace(table, keys=["parallel", "seed"])
    assert numeric_axis(table) is None
    assert len(score_figure(table).axes[0].patches) == 4


def rates(sweep, *results, key="optim.lr"):
    """A job for each (value, step time, validation loss)."""
    for num, (value, seconds, val_loss) in enumerate(results):
        folder = leave(sweep, num, f"{key}={value}", times=[seconds] * 6)
        summary = json.loads((folder / "summary.json").read_text()) | {"best_val_loss": val_loss}
        (folder / "summary.json").write_text(json.dumps(summary))
        record = {"step": 6, "val_loss": val_loss, "val_accuracy": 1 - val_loss / 10}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
    return sweep


@pytest.mark.parametrize(
    "key, named, name, best",
    [
        ("optim.lr", None, "val_loss", 1),
        ("parallel.chunks", None, "step_time_s", 0),
        ("train.compile", None, "step_time_s", 0),
        ("seed", None, "val_loss", 1),
        ("optim.lr", "step_time_s", "step_time_s", 0),
        ("optim.lr", "samples_per_s", "samples_per_s", 0),
        ("parallel.chunks", "val_accuracy", "val_accuracy", 1),
    ],
)
def test_jobs_are_ranked_by_what_was_asked_for_or_by_what_varies(tmp_path, key, named, name, best):
    table = read_table(rates(tmp_path, (1, 1.0, 8.0), (3, 2.0, 5.0), (2, 3.0, 6.0), key=key), named)
    assert table.objective.name == name
    assert table.best == [table.rows[best]]


def test_without_any_validation_the_training_loss_ranks(tmp_path):
    leave(tmp_path, 0, "optim.lr=1", times=[1.0] * 6)
    leave(tmp_path, 1, "optim.lr=2", times=[2.0] * 8)  # whose loss, 2 / steps, is lower
    table = read_table(tmp_path)
    assert table.objective.name == "final_loss" and table.best == [table.rows[1]]


def test_a_direction_that_is_asked_for_wins_over_the_name(tmp_path, capsys):
    sweep = rates(tmp_path, (1, 1.0, 8.0), (3, 2.0, 5.0))
    cfg = compose("sweep.objective=val_loss", "sweep.direction=maximize")
    with open_dict(cfg):
        cfg.hydra = {"sweep": {"dir": str(sweep)}}
    SweepReport().on_multirun_end(cfg)
    assert "Best: optim.lr=1 with val_loss 8;" in capsys.readouterr().out


def test_jobs_that_train_the_same_say_how_far_their_losses_are_from_those_of_single(tmp_path):
    losses = {"ddp": (2.0, 1.0 + 1e-7), "single": (2.0, 1.0), "fsdp": (2.0 + 4e-7, 1.0), "pipelined": (2.0,)}
    jobs = [(name, rate, curve) for rate in (1, 2) for name, curve in losses.items()]
    for num, (name, rate, curve) in enumerate(jobs):
        folder = leave(tmp_path, num, f"parallel={name}", f"optim.lr={rate}", times=[1.0] * 6, parallel=name)
        records = [{"step": step, "loss": rate * loss, "step_time_s": 1.0} for step, loss in enumerate(curve, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = read_table(tmp_path)
    shown = [cells["loss difference"] for cells in table.cells.values()]
    assert shown == ["1e-07", "reference", "2e-07", "other steps"] * 2
    assert "of the job marked as reference" in [*results(table)][-1]
    write_csv(table, tmp_path / "sweep.csv")
    cells = [row["loss_difference"] for row in csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines())]
    assert float(cells[0]) == pytest.approx(1e-7) and cells[1] == "" and cells[3] == "inf"


def test_a_job_that_diverges_does_not_flatten_the_curves_of_others(tmp_path):
    for num, losses in enumerate([(2.0, 1.0, 0.5), (2.0, 1.5, 1.0), (2.0, 1e20, 1e35)]):
        folder = leave(tmp_path, num, f"optim.lr={num}", times=[1.0] * 3, status="failed" if num == 2 else "finished")
        records = [{"step": step, "loss": loss, "step_time_s": 1.0} for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    bottom, top = loss_figure(read_table(tmp_path)).axes[0].get_ylim()
    assert bottom < 0.5 and top == 4.0
