"""The learning curves of a run, and the page with its pictures."""

import numpy as np
import pytest
from composed import run

from training.reporting.curves import draw
from training.reporting.loggers import Loggers, NoLogger
from training.reporting.metrics import points_of
from training.reporting.page import write_page
from training.reporting.recorder import Recorder


def figure(records):
    return draw({"": [points_of(records)]}, columns=2)


def records(steps, every=10, diverges=False):
    for step in range(1, steps + 1):
        loss = None if step == 5 else 2 / step + (1e9 if diverges and step == steps else 0)
        yield {"step": step, "loss": loss, "accuracy": 1 - 1 / step, "lr": 1e-3 / step, "grad_norm": 1.0,
               "step_time_s": 0.1, "samples_per_s": 9.0, "skipped": step == 5}  # fmt: skip
        if step % every == 0:
            yield {"step": step, "val_loss": 3 / step, "val_accuracy": 0.5, "val_auroc": 0.6, "val_perplexity": 9.0}


def test_each_number_has_a_panel_and_the_validation_is_dashed():
    panels = {axes.get_title("left"): axes for axes in figure([*records(50)]).axes}
    both = " (dashed: validation)"
    assert list(panels) == ["loss" + both, "accuracy" + both, "auroc" + both, "grad_norm", "lr"]
    assert panels["auroc" + both].get_lines()[0].get_linestyle() == "--"
    training, validation = panels["loss" + both].get_lines()
    assert training.get_xdata().tolist() == [step for step in range(1, 51) if step != 5]
    assert validation.get_xydata().tolist() == [[step, 3 / step] for step in (10, 20, 30, 40, 50)]
    assert [line.get_linestyle() for line in (training, validation)] == ["-", "--"]


def test_several_runs_are_a_mean_in_a_band_at_the_steps_that_all_have():
    runs = [[(step, float(step + run)) for step in range(1, 5 + run)] for run in (0, 1, 3)]
    (axes,) = draw({"a": [{"loss": run} for run in runs]}).axes
    assert [one.get_title("left") for one in draw({"a": [{"loss": runs[0], "val_loss": runs[1]}], "b": []}).axes] == [
        "loss", "validation loss"
    ]  # fmt: skip
    (line,), (band,) = axes.get_lines(), axes.collections
    assert line.get_xydata() == pytest.approx(np.array([[step, step + 4 / 3] for step in range(1, 5)]))
    heights = {round(y - x - 4 / 3, 6) for x, y in band.get_paths()[0].vertices}
    assert heights == {round(sign * np.std((0, 1, 3), ddof=1), 6) for sign in (1, -1)}


def test_runs_without_a_step_in_common_and_a_term_that_begins_at_zero_are_drawn():
    first, second = ({"loss": [(step, 1.0), (step + 1, 1.0)]} for step in (1, 5))
    assert not draw({"a": [first, second], "b": []}).axes[0].get_lines()
    growing = figure([{"step": step, "loss": 1.0, "kl_loss": float(step - 1)} for step in range(1, 9)])
    assert growing.axes[1].get_title("left") == "kl_loss" and growing.axes[1].get_ylim()[1] > 7


def test_a_long_run_has_some_of_its_steps_and_a_validation_once_is_a_point():
    training, validation = figure([*records(2000, every=2000)]).axes[0].get_lines()
    assert len(training.get_xdata()) == 500 and validation.get_xdata().tolist() == [2000]


def test_a_loss_that_diverges_does_not_flatten_the_curve():
    one, other = (dict(points_of(records(20, diverges=end))) for end in (True, False))
    for runs in ({"": [one]}, {"a": [one], "b": [other]}, {"a": [one, other], "b": [other, other]}):
        bottom, top = draw(runs).axes[0].get_ylim()
        assert -0.2 < bottom < 0.1 and top == 4.0


def test_a_run_without_numbers_has_no_curves():
    assert figure([]) is None and figure([{"step": 1, "step_time_s": 0.1, "loss": None}]) is None


def test_a_page_has_every_picture_of_the_run_and_is_not_written_without_one(tmp_path):
    write_page(tmp_path)
    assert not [*tmp_path.iterdir()]
    for name in ("curves", "val_confusion_matrix"):
        (tmp_path / f"{name}.png").write_bytes(b"\x89PNG")
    (tmp_path / "summary.json").write_text(
        '{"model": "<toy>", "parallel": "ddp", "steps": 3, "test_loss": 0.123456789}'
    )
    write_page(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2 and "<figcaption>val confusion matrix" in page
    assert "<h1>&lt;toy&gt;, ddp</h1>" in page and "0.123457" in page


def test_a_run_of_enough_steps_leaves_its_curves_and_its_page(tmp_path):
    summary = run(tmp_path, "train.epochs=null", "train.steps=20", "train.eval_every=5")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert f"{summary['test_loss']:.6g}" in (tmp_path / "report.html").read_text()


def test_an_evaluation_or_a_short_run_that_has_drawn_something_has_a_page(tmp_path):
    (tmp_path / "val_roc.png").write_bytes(b"\x89PNG")
    recorder = Recorder(tmp_path, Loggers({}, lambda *section: NoLogger()), total_steps=1)
    recorder.close({"model": "toy", "parallel": "single", "steps": 1})
    assert "<h1>toy, single</h1>" in (tmp_path / "report.html").read_text()
