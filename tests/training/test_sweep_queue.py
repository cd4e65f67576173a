"""Which jobs of a sweep run when its command is repeated."""

import pytest
from sweep_jobs import leave

from common.errors import TrainingError
from training.reporting.job_record import Job, read_job
from training.sweep.sweeper import Entry, batches, open_folders


def entries(sweep, *seeds, more=(), queued=False):
    words = [[f"seed={seed}", *more] for seed in seeds]
    return [Entry(Job(i, tuple(w)), w, sweep / str(i), queued) for i, w in enumerate(words)]


def numbers(todo):
    return [entry.job.num for entry in todo]


def test_in_an_empty_folder_every_job_waits_to_run(tmp_path):
    assert numbers(open_folders(entries(tmp_path, 1, 2), tmp_path)) == [0, 1]
    assert [read_job(tmp_path / name).status for name in "01"] == ["waiting", "waiting"]


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
