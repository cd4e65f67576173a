"""The table and the figures of a sweep, read from the files of its jobs; which of these run when it is repeated."""

import csv
import json
from types import SimpleNamespace

import pytest
from composed import compose, plain
from omegaconf import OmegaConf, open_dict
from sweep_jobs import chunk_sweep, leave

from common.errors import TrainingError
from training.command.sweep_jobs import Entry, _begin, batches, open_folders
from training.reporting.job_record import Job, write_job
from training.studies.sweep.figure import loss_figure, score_figure
from training.studies.sweep.report import reported, results
from training.studies.sweep.table import Objective, read_table, value_for_sweeper, write_csv


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


def test_the_best_job_comes_with_the_command_that_runs_it_again(tmp_path):
    for num, rate in enumerate(("0.1", "0.2")):
        leave(tmp_path, num, "model=toy", f"optim.lr={rate}", "train.resume=auto", times=[1.0 + num] * 6)
    said = "\n".join(results(read_table(tmp_path)))
    assert "The same again: python train.py model=toy optim.lr=0.1\n" in f"{said}\n"


def test_a_job_that_skipped_steps_is_not_simply_finished(tmp_path):
    leave(tmp_path, 0, "seed=1", times=[1.0] * 6, steps=6, skipped_steps=5)
    assert read_table(tmp_path).rows[0].status == "finished, 5 of 6 steps skipped"


WITHOUT_RESULT = [
    ("waiting", None, "not started"),
    ("running", None, "no end is recorded"),
    ("interrupted", None, ""),
    ("failed", "10 cannot be cut\ninto 3", "10 cannot be cut"),
    ("failed", "rank 1 raised\nTraceback (most recent call last):\n  x\nKeyError: 'a'\nin step 3", "KeyError: 'a'"),
]


@pytest.mark.parametrize("status, error, shown", WITHOUT_RESULT)
def test_a_job_without_result_says_why_in_a_line(tmp_path, status, error, shown):
    leave(tmp_path, 0, "seed=1", status=status, error=error)
    assert read_table(tmp_path).rows[0].problem == shown


def test_the_figure_shows_spread_best_and_ideal(tmp_path):
    figure = score_figure(read_table(chunk_sweep(tmp_path)))
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert set(labels) == {"measured", "ideal", "best: parallel.chunks=12, 2.9 s"}
    (axes,) = figure.axes
    assert axes.get_xlabel() == "parallel.chunks" and axes.get_ylabel() == "time per step (s)"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == "1 3 5 6 10 12 20 30".split()


def rates(sweep, *results, key="optim.lr"):
    """A job for each (value, step time, validation loss)."""
    for num, (value, seconds, val_loss) in enumerate(results):
        folder = leave(sweep, num, f"{key}={value}", times=[seconds] * 6, best_val_loss=val_loss)
        record = {"step": 6, "val_loss": val_loss, "val_accuracy": 1 - val_loss / 10}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
    return sweep


RANKED = [
    ("optim.lr", None, "val_loss", 1),
    ("parallel.chunks", None, "step_time_s", 0),
    ("optim.lr", "step_time_s", "step_time_s", 0),
    ("parallel.chunks", "val_accuracy", "val_accuracy", 1),
]


@pytest.mark.parametrize("key, named, name, best", RANKED)
def test_jobs_are_ranked_by_what_was_asked_for_or_by_what_varies(tmp_path, key, named, name, best):
    table = read_table(rates(tmp_path, (1, 1.0, 8.0), (3, 2.0, 5.0), (2, 3.0, 6.0), key=key), named)
    assert table.objective.name == name
    assert table.best == [table.rows[best]]


def test_of_jobs_that_differ_by_rounding_only_the_fastest_is_the_best(tmp_path):
    sweep = rates(tmp_path, (3, 2.0, 5.0), (1, 1.0, 5.0 + 1e-9), (2, 3.0, 6.0), key="parallel.chunks")
    table = read_table(sweep, "val_loss")
    assert table.best == [table.rows[1]]
    said = next(results(table))
    assert "with val_loss 5, the fastest of 2 jobs that have it; the worst, parallel.chunks=2, has 6." in said


def test_curves_that_lie_on_each_other_are_all_visible(tmp_path):
    for num, name in enumerate(("single", "ddp", "fsdp")):
        leave(tmp_path, num, f"parallel={name}", times=[1.0] * 6, parallel=name)
    figure = loss_figure(read_table(tmp_path))
    marks = [line.get_markevery() for line in figure.axes[0].get_lines()]
    assert [first * 3 / each for first, each in marks] == pytest.approx([0, 1, 2])


def test_without_any_validation_the_training_loss_ranks(tmp_path):
    leave(tmp_path, 0, "optim.lr=1", times=[1.0] * 6)
    leave(tmp_path, 1, "optim.lr=2", times=[2.0] * 8)  # whose loss, 2 / steps, is lower
    table = read_table(tmp_path)
    assert table.objective.name == "final_loss" and table.best == [table.rows[1]]


def test_a_direction_that_is_asked_for_wins_over_the_name(tmp_path, capsys):
    sweep = rates(tmp_path, (1, 1.0, 8.0), (3, 2.0, 5.0))
    cfg = compose("sweep.objective=val_loss", "sweep.direction=maximize")
    with open_dict(cfg):
        cfg.hydra = {"sweep": {"dir": str(sweep)}, "sweeper": {}}
    with reported(cfg):
        pass
    assert "Best: optim.lr=1 with val_loss 8;" in capsys.readouterr().out


def test_jobs_that_train_the_same_say_how_far_their_losses_are_from_those_of_single(tmp_path):
    losses = {"ddp": (2.0, 1.0 + 1e-7), "single": (2.0, 1.0), "fsdp": (2.0 + 4e-7, 1.0), "pipelined": (2.0,)}
    jobs = [(name, rate, curve) for rate in (1, 2) for name, curve in losses.items()]
    for num, (name, rate, curve) in enumerate(jobs):
        curve = [rate * loss for loss in curve]
        leave(tmp_path, num, f"parallel={name}", f"optim.lr={rate}", times=[1.0] * 6, losses=curve, parallel=name)
    table = read_table(tmp_path)
    shown = [cells["loss difference"] for cells in table.cells.values()]
    assert shown == ["1e-07", "reference", "2e-07", "other steps"] * 2
    assert "of the job marked as reference" in [*results(table)][-1]
    write_csv(table, tmp_path / "sweep.csv")
    cells = [row["loss_difference"] for row in csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines())]
    assert float(cells[0]) == pytest.approx(1e-7) and cells[1] == "" and cells[3] == "inf"


def test_a_job_that_diverges_does_not_flatten_the_curves_of_others(tmp_path):
    for num, losses in enumerate([(2.0, 1.0, 0.5), (2.0, 1.5, 1.0), (2.0, 1e20, 1e35)]):
        status = "failed" if num == 2 else "finished"
        leave(tmp_path, num, f"optim.lr={num}", times=[1.0] * 3, losses=losses, status=status)
    bottom, top = loss_figure(read_table(tmp_path)).axes[0].get_ylim()
    assert bottom < 0.5 and top == 4.0


# -- which jobs run when the command is repeated ----------------------------------------------------------------------


def entries(sweep, *seeds, more=(), queued=False):
    words = [[f"seed={seed}", *more] for seed in seeds]
    return [Entry(Job(i, tuple(w)), w, sweep / str(i), queued) for i, w in enumerate(words)]


def numbers(todo):
    return [entry.job.num for entry in todo]


@pytest.mark.parametrize("more", [(), ("train.resume=auto",)])
def test_finished_jobs_are_left_out_and_said_so_and_others_run_again_in_their_folders(tmp_path, capsys, more):
    leave(tmp_path, 0, "seed=1", times=[1.0] * 6)
    (leave(tmp_path, 1, "seed=2", status="interrupted") / "metrics.jsonl").write_text("{}\n")
    leave(tmp_path, 2, "seed=3", status="failed", error="no memory")
    assert numbers(open_folders(entries(tmp_path, 1, 2, 3, 4, more=more), tmp_path)) == [1, 2, 3]
    assert "job 0 is finished: seed=1" in capsys.readouterr().out
    assert (tmp_path / "1" / "metrics.jsonl").exists(), "it goes on from what it has left"


def test_jobs_that_nobody_waits_for_are_not_queued_twice(tmp_path, capsys):
    leave(tmp_path, 0, "seed=1", status="running")
    leave(tmp_path, 1, "seed=2", status="failed")
    assert numbers(open_folders(entries(tmp_path, 1, 2, queued=True), tmp_path)) == [1]
    assert "job 0 is running" in capsys.readouterr().out


def test_a_mended_command_gets_the_folders_of_jobs_that_failed_before_their_first_step(tmp_path):
    leave(tmp_path, 0, "seed=1", "optim.lr=-1", status="failed", error="Invalid learning rate")
    assert numbers(open_folders(entries(tmp_path, 1, more=("optim.lr=1",)), tmp_path)) == [0]
    (tmp_path / "0" / "metrics.jsonl").write_text("{}\n")
    write_job(tmp_path / "0", Job(0, ("seed=1", "optim.lr=-1"), "failed"))
    with pytest.raises(TrainingError, match="holds another run"):
        open_folders(entries(tmp_path, 1, more=("optim.lr=1",)), tmp_path)


def test_a_sweeper_of_someone_else_s_gets_no_folder_of_an_earlier_job(tmp_path):
    leave(tmp_path, 0, "seed=1", times=[1.0] * 6)
    place = OmegaConf.create({"job": {"num": 0}, "sweep": {"dir": str(tmp_path)}, "sweeper": {"_target_": "another"}})
    job = SimpleNamespace(cfg=compose("seed=2"), run_dir=tmp_path / "0", job=place, typed=["seed=2"])
    with pytest.raises(TrainingError, match=r"0 holds another run"):
        _begin(job, "running")


def test_a_sweeper_is_told_the_best_evaluation_in_the_direction_that_is_asked_for(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val_bleu": 1.0}\n{"step": 2, "val_bleu": 3.0}\n')
    for direction, value in (("maximize", 3.0), ("minimize", 1.0)):
        cfg = plain(compose("sweep.objective=val_bleu", f"sweep.direction={direction}"))
        assert value_for_sweeper(cfg, tmp_path) == value


@pytest.mark.parametrize("theirs", ["another job", "a run of no sweep"])
def test_another_run_s_folder_is_refused_before_anything_is_touched(tmp_path, theirs):
    folder = leave(tmp_path, 1, "seed=7", times=[1.0] * 6)
    if theirs == "a run of no sweep":
        (folder / "job.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TrainingError, match="holds another run"):
        open_folders(entries(tmp_path, 1, 2), tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_launcher_is_given_jobs_whose_numbers_have_no_gaps(tmp_path):
    todo = [entry for entry in entries(tmp_path, *range(8)) if entry.job.num not in (0, 3)]
    assert [numbers(run) for run in batches(todo, None)] == [[1, 2], [4, 5, 6, 7]]
    assert [numbers(run) for run in batches(todo, 3)] == [[1, 2], [4, 5, 6], [7]]


def test_jobs_that_continue_one_run_are_compared_by_their_own_validation():
    objective = Objective("val_loss", "minimize")
    summary = {"best_val_loss": 0.05}  # of the run that they continue
    assert objective.of(summary, [{"step": 9, "loss": 1.0}, {"step": 9, "val_loss": 0.4}]) == 0.4
    assert objective.of(summary, [{"step": 9, "loss": 1.0}]) == 0.05
