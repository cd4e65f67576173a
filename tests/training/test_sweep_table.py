"""The table and the figures of a sweep, read from the files of its jobs."""

import csv

import numpy as np
import pytest
from sweep_jobs import chunk_sweep, leave

from training.sweep.figure import ideal_costs, loss_figure, numeric_axis, time_figure
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
        leave(tmp_path, num, f"model={model}", f"optim.lr={num % 2}", times=[seconds] * 6, model=model)
    assert [row.best for row in read_table(tmp_path).rows] == [False, True, False, True]


def test_steps_of_different_sizes_are_compared_by_the_sample(tmp_path):
    leave(tmp_path, 0, "train.global_batch_size=10", times=[1.0] * 6, batch=10)
    leave(tmp_path, 1, "train.global_batch_size=100", times=[2.0] * 6, batch=100)
    table = read_table(tmp_path)
    assert table.per_sample
    assert [row.cost for row in table.rows] == pytest.approx([0.1, 0.02])
    assert table.rows[1].best


def test_neither_the_first_steps_count_nor_what_was_set_aside(tmp_path):
    leave(tmp_path, 0, "seed=1", times=[50.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    leave(tmp_path / "superseded", 0, "seed=1", status="interrupted")
    (row,) = read_table(tmp_path).rows
    assert row.spread == (1.0, 1.0)


@pytest.mark.parametrize(
    "status, error, shown",
    [
        ("waiting", None, "not started"),
        ("running", None, "no end is recorded"),
        ("interrupted", None, ""),
        ("failed", "10 cannot be cut\ninto 3", "10 cannot be cut"),
        ("failed", "rank 1 raised\nTraceback (most recent call last):\n  x\nKeyError: 'a'\n", "KeyError: 'a'"),
    ],
)
def test_a_job_without_result_says_why_in_a_line(tmp_path, status, error, shown):
    leave(tmp_path, 0, "seed=1", status=status, error=error)
    assert read_table(tmp_path).rows[0].problem == shown


def test_the_ideal_curve_follows_the_bubble_and_no_job_is_below_it(tmp_path):
    table = read_table(chunk_sweep(tmp_path))
    chunks = np.array([float(row.values["parallel.chunks"]) for row in table.timed])
    ideal = ideal_costs(table.timed, chunks)
    assert ideal / ideal[0] == pytest.approx((chunks + 1) / chunks / 2)  # (m + p - 1) / m with two stages
    above = np.array([row.cost for row in table.timed]) / ideal
    assert above.min() == pytest.approx(1) and (above > 1 - 1e-9).all()


def test_the_figure_shows_spread_best_ideal_and_what_failed(tmp_path):
    figure = time_figure(read_table(chunk_sweep(tmp_path)))
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["measured", "ideal", "best: parallel.chunks=12, 2.9 s", "not finished"]
    (axes,) = figure.axes
    assert axes.get_xlabel() == "parallel.chunks" and axes.get_ylabel() == "time per step (s)"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == "1 2 3 5 6 10 12 20 30".split()


def test_words_are_bars_numbers_an_axis_with_a_curve_for_each_word_and_seeds_neither(tmp_path):
    for num, (strategy, dp) in enumerate([("ddp", 1), ("ddp", 2), ("pipe_ddp", 1), ("pipe_ddp", 2)]):
        leave(tmp_path, num, f"parallel={strategy}", f"parallel.dp={dp}", f"seed={num}", times=[1.0] * 6)
    table = read_table(tmp_path)
    table.keys = ["parallel", "parallel.dp"]
    assert numeric_axis(table) == "parallel.dp"
    labels = [text.get_text() for text in time_figure(table).legends[0].get_texts()]
    assert {"parallel=ddp", "parallel=pipe_ddp"} <= set(labels)
    table.keys = ["parallel", "seed"]
    assert numeric_axis(table) is None
    assert len(time_figure(table).axes[0].patches) == 4


def test_losses_are_drawn_for_every_job_that_has_any(tmp_path):
    assert loss_figure(read_table(leave(tmp_path / "a", 0, "seed=1").parent)) is None
    assert len(loss_figure(read_table(chunk_sweep(tmp_path / "b"))).axes[0].lines) == 8
