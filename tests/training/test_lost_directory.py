"""A run whose directory is deleted while it trains."""

import shutil

from composed import run, steps

from training.loop import Loop

RECIPE = ["train.epochs=null", "train.steps=12", "train.checkpoint_every=3", "train.eval_every=4"]


def test_a_run_directory_that_is_deleted_is_begun_anew_and_said(tmp_path, monkeypatch, caplog):
    record_step = Loop._record

    def delete(self, step, *args, **kwargs):
        if step == 8:
            self.checkpoints.wait_pending()
            shutil.rmtree(tmp_path / "run")
        record_step(self, step, *args, **kwargs)

    monkeypatch.setattr(Loop, "_record", delete)
    run(tmp_path / "run", *RECIPE)
    assert "metrics.jsonl was removed while this run writes to it" in caplog.text
    assert [line["step"] for line in steps(tmp_path / "run")] == [8, 9, 10, 11, 12]
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "latest").resolve().name == "step-00000012"
    monkeypatch.undo()
    run(tmp_path / "run", *RECIPE, "train.resume=auto", "train.steps=14")
    assert [line["step"] for line in steps(tmp_path / "run")] == list(range(8, 15))
