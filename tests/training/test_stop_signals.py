"""A run that is told to stop saves at its next border, wherever it is, and goes on from there."""

import pytest
from composed import records, run

from launchers import stopping
from launchers.stopping import Stopped
from training import evaluate

SHORT = ["train.epochs=null", "train.steps=6", "train.eval_every=3", "train.eval_batches=3"]


@pytest.fixture
def wish(monkeypatch):
    """``wish(n)``: from the n-th time on that it is asked, the loop hears that it should stop."""

    def at(count):
        asked = []

        def wanted():
            asked.append(None)
            return len(asked) >= count

        monkeypatch.setattr(stopping, "wanted", wanted)
        monkeypatch.setattr(evaluate, "_ASK_EVERY_S", 0.0)
        return asked

    return at


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def without_times(lines):
    return [{key: value for key, value in line.items() if not key.endswith("_s")} for line in lines]


def test_stopped_at_any_border_and_resumed_a_run_has_the_records_of_one_that_was_not(tmp_path, wish, monkeypatch):
    whole = run(tmp_path / "whole", *SHORT)
    asked = wish(10**9)
    run(tmp_path / "counted", *SHORT)
    borders = len(asked)
    assert borders > 12, "before the first step, at each of six, and within the evaluations"
    for border in range(1, borders + 1):
        folder = tmp_path / f"stopped-{border}"
        wish(border)
        try:
            run(folder, *SHORT)
        except Stopped as stopped:
            assert not (folder / "summary.json").exists()
            latest = folder / "checkpoints" / "latest"
            if border == 1:
                assert "stopped after step 0 of 6, nothing was new to save" in str(stopped)
                assert not latest.exists()
            else:
                assert f"saved in {latest.resolve()}" in str(stopped)
        monkeypatch.undo()
        summary = run(folder, *SHORT, "train.resume=auto")
        assert without_times(records(folder)) == without_times(records(tmp_path / "whole")), f"border {border}"
        for key in ("steps", "first_loss", "final_loss", "best_val_loss", "test_loss"):
            assert summary[key] == whole[key], f"{key}, border {border}"


def test_a_run_that_is_resumed_and_stopped_at_once_has_nothing_new_to_save(tmp_path, wish, monkeypatch):
    wish(4)
    with pytest.raises(Stopped, match="stopped after step 3 of 6, saved in") as stopped:
        run(tmp_path, *SHORT)
    assert stopped.value.steps == 3
    before = written(tmp_path / "checkpoints")
    wish(1)
    with pytest.raises(Stopped, match="stopped after step 3 of 6") as stopped:
        run(tmp_path, *SHORT, "train.resume=auto")
    assert stopped.value.steps == 0, "a job that gets no further is not queued again"
    assert written(tmp_path / "checkpoints") == before


def test_a_stop_without_checkpoints_on_the_way_saves_one(tmp_path, wish):
    wish(3)
    with pytest.raises(Stopped, match="stopped after step 2 of 6, saved in"):
        run(tmp_path, *SHORT, "train.checkpoint_every=null")
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-00000002"


def test_an_evaluation_asks_about_once_a_second_however_many_batches_it_has(tmp_path, wish, monkeypatch):
    asked = wish(10**9)
    monkeypatch.setattr(evaluate, "_ASK_EVERY_S", 1.0)
    few = ["train.epochs=null", "train.steps=1", "train.global_batch_size=1", "data.samples=3000"]
    run(tmp_path, *few)
    assert len(asked) < 100, "before the run, in its step, and now and then in thousands of batches"
