"""Jobs of a sweep that differ only in a seed or a fold are repetitions of one setting, whose numbers are averaged."""

import csv
import re

import numpy as np
import pytest
from sweep_jobs import leave

from training.studies.sweep.figure import loss_figure, score_figure
from training.studies.sweep.report import describe, page, results
from training.studies.sweep.table import escape, latex, plus_minus, read_table, write_csv

# The validation loss of seeds 1, 2 and 3 by learning rate. The best job is one of 0.1, the best mean is of 0.2.
LOSSES = {"0.1": (0.30, 0.90, 0.60), "0.2": (0.50, 0.52, 0.45), "0.3": (0.70, 0.71, 0.72)}
FEWER = {"0.1": (0.30, 0.90, 0.60), "0.2": (0.50, None, 0.45), "0.3": (None, None, None)}


def sweep(folder, losses, *more):
    for num, (rate, seed) in enumerate((rate, seed) for rate in losses for seed in range(3)):
        loss, words = losses[rate][seed], ("model=toy", f"seed={seed + 1}", f"optim.lr={rate}", *more)
        curve = [(loss or 9) * (1 + 1 / step) for step in range(1, 13)]
        status = {"status": "failed", "error": "no memory"} if loss is None else {}
        leave(folder, num, *words, times=[1.0] * 12, losses=curve, best_val_loss=loss, test_loss=loss, **status)
    return read_table(folder)


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_setting_has_the_mean_and_the_sample_standard_deviation_of_its_jobs(tmp_path):
    jobs = sweep(tmp_path, LOSSES)
    settings = jobs.settings()
    write_csv(settings, tmp_path / "sweep.csv")
    for row, line, values in zip(settings.rows, rows(tmp_path / "sweep.csv"), LOSSES.values(), strict=True):
        assert row.score == pytest.approx(np.mean(values))
        assert float(line["val_loss"]) == pytest.approx(np.mean(values)) == pytest.approx(float(line["test_loss"]))
        assert float(line["val_loss_std"]) == pytest.approx(np.std(values, ddof=1))
        assert (line["n"], line["model"], line["status"], "seed" in line) == ("3", "toy", "3 of 3 finished", False)
    write_csv(jobs, tmp_path / "jobs.csv")
    assert [float(line["val_loss"]) for line in rows(tmp_path / "jobs.csv")] == [
        one for own in LOSSES.values() for one in own
    ]


def test_the_best_mean_wins_and_all_its_jobs_are_run_again(tmp_path):
    settings = sweep(tmp_path, LOSSES).settings()
    first, again, note = results(settings)
    assert first == "Best: optim.lr=0.2 with val_loss 0.490 ± 0.036; the worst, optim.lr=0.3, has 0.710 ± 0.010."
    assert again == "The same again: python train.py -m model=toy seed=1,2,3 optim.lr=0.2"
    assert note == "Numbers are means over seed ± their sample standard deviation (n - 1)."
    assert describe(settings).splitlines()[2].split()[:4] == ["3", "4", "5", "0.2"]


def test_failed_repetitions_are_left_out_and_said(tmp_path):
    settings = sweep(tmp_path, FEWER).settings()
    write_csv(settings, tmp_path / "sweep.csv")
    lines = rows(tmp_path / "sweep.csv")
    assert [line["n"] for line in lines] == ["3", "2", "0"] and lines[2]["val_loss"] == ""
    assert float(lines[1]["val_loss_std"]) == pytest.approx(np.std((0.50, 0.45), ddof=1))
    assert lines[1]["status"] == "2 of 3 finished; job 4 failed: no memory"
    assert "0 of 3 finished; job 6 failed: no memory" in describe(settings)
    assert "0.1 & 3 & $0.60 \\pm 0.30$" in latex(settings) and "0.3 & 0 & -- & --" in latex(settings)
    assert score_figure(settings) and loss_figure(settings)


def test_a_repetition_alone_has_no_deviation(tmp_path):
    settings = sweep(tmp_path, {"0.1": (0.3, None, None), "0.2": (0.4, 0.4, 0.4)}).settings()
    write_csv(settings, tmp_path / "sweep.csv")
    assert [line["val_loss_std"] for line in rows(tmp_path / "sweep.csv")] == ["", "0.0"]
    assert next(results(settings)).startswith(
        "Best: optim.lr=0.1 with val_loss 0.3; the worst, optim.lr=0.2, has 0.4 ± 0."
    )


REPEATED = [
    (["seed", "*.fold"], ["optim.lr"], 3),
    (["seed", "data.fold"], ["optim.lr"], 3),
    (["optim.*"], ["seed"], 3),
    ([], ["seed", "optim.lr"], 9),
    (["seed", "optim.lr"], [], 1),
]


@pytest.mark.parametrize("repeat, keys, number", REPEATED)
def test_what_repeats_is_named(tmp_path, repeat, keys, number):
    settings = sweep(tmp_path, LOSSES).settings(repeat)
    assert settings.keys == keys and len(settings.rows) == number
    means = [np.mean([job.score for job in row.repeats or [row]]) for row in settings.rows]
    assert [row.score for row in settings.rows] == pytest.approx(means)
    everything = [job for row in settings.rows for job in row.repeats or [row]]
    assert len(everything) == 9


def test_seeds_and_folds_are_averaged_together_and_one_setting_has_a_mean_too(tmp_path):
    for num, (fold, seed) in enumerate((fold, seed) for fold in range(2) for seed in range(2)):
        leave(tmp_path, num, f"data.fold={fold}", f"seed={seed}", times=[1.0] * 6, best_val_loss=float(num))
    settings = read_table(tmp_path).settings()
    said = [*results(settings)]
    assert said[0] == f"Mean: all repetitions with val_loss {plus_minus(1.5, np.std(range(4), ddof=1))}."
    assert said[1].endswith("train.py -m data.fold=0,1 seed=0,1") and "means over data.fold, seed ±" in said[2]


def test_layouts_that_are_repeated_say_the_largest_loss_difference_of_their_jobs(tmp_path):
    for num, (name, seed) in enumerate((name, seed) for name in ("single", "ddp") for seed in (1, 2)):
        losses = [2.0 * seed, 1.0 + (name == "ddp") * seed * 1e-7]
        leave(tmp_path, num, f"parallel={name}", f"seed={seed}", times=[1.0] * 6, losses=losses, parallel=name)
    settings = read_table(tmp_path).settings()
    assert [cells["loss difference"] for cells in settings.cells.values()] == ["", "2e-07"]
    assert "relative to the training loss of the job marked as reference" in [*results(settings)][-1]


def test_the_figures_have_error_bars_and_bands(tmp_path):
    settings = sweep(tmp_path, LOSSES).settings()
    (bars,) = [one for one in score_figure(settings).axes[0].containers if hasattr(one, "has_yerr")]
    lengths = [np.ptp(segment[:, 1]) for segment in bars[2][0].get_segments()]
    assert lengths == pytest.approx([2 * np.std(values, ddof=1) for values in LOSSES.values()])
    curves = loss_figure(settings).axes[0]
    means = [line.get_ydata()[-1] for line in curves.get_lines()]
    assert means == pytest.approx([np.mean(values) * (1 + 1 / 12) for values in LOSSES.values()])
    assert len(curves.collections) == 3


def test_the_page_has_settings_and_their_jobs(tmp_path):
    jobs = sweep(tmp_path, FEWER)
    text = page(jobs, "python train.py -m", jobs.settings())
    assert text.index("<h2>Settings</h2>") < text.index("<h2>Jobs</h2>") and text.count("data:image/svg") == 2
    assert text.count('class="best"') == 1 + 3 and "0.475 ± 0.035" in text
    assert re.findall(r'<a href="(\d)/">', text) == [*map(str, range(9))] * 2


SHOWN = [
    (0.41234, 0.01267, "0.412 ± 0.013"), (1234.5, 0.3, "1234.50 ± 0.30"), (1234.5, 123.4, "1234 ± 123"),
    (0.5, float("nan"), "0.5"), (0.5, 0.0, "0.5 ± 0"), (0.5, 1e-9, "0.5 ± 1e-09"), (-2.0, 0.096, "-2.000 ± 0.096"),
]  # fmt: skip


@pytest.mark.parametrize("mean, deviation, shown", SHOWN)
def test_a_mean_has_the_digits_of_its_deviation(mean, deviation, shown):
    assert plus_minus(mean, deviation) == shown


def test_a_table_for_a_paper_is_latex(tmp_path):
    text = latex(sweep(tmp_path, LOSSES, "data.name=a_b&c").settings())
    assert text.splitlines()[:5] == [
        r"\begin{tabular}{lccc}", r"\toprule", r"optim.lr & n & val\_loss & test\_loss \\", r"\midrule",
        r"0.1 & 3 & $0.60 \pm 0.30$ & $0.60 \pm 0.30$ \\",
    ]  # fmt: skip
    assert text.splitlines()[5] == r"0.2 & 3 & $\mathbf{0.490 \pm 0.036}$ & $0.490 \pm 0.036$ \\"
    assert escape(r"a_b&c 5% $x^2$ {~\}") == (
        r"a\_b\&c 5\% \$x\textasciicircum{}2\$ \{\textasciitilde{}\textbackslash{}\}"
    )
