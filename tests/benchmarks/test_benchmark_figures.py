"""Figures are drawn from the rows of tables."""

from benchmarks import figure, published_figures, table
from benchmarks.timing import Spread


def test_a_spread_comes_back_from_the_columns_it_was_written_to():
    spread = Spread(2.5, 2.25, 3.125)
    assert Spread.read(spread.columns()) == spread


def test_pipelining_draws_every_model_with_its_sweep(tmp_path):
    rows = [
        {"model": model, "run": run, **Spread(2.0, 1.5, 2.5).columns()}
        for model in ("resnet50", "transformer")
        for run in ("single", "pipelined", "torchgpipe")
    ]
    swept = [
        {"model": row["model"], "run": row["run"], "schedule": "", "chunks": chunks, "seconds a step": "1.5"}
        for row in rows
        for chunks in (2, 4)
    ]
    assert figure.pipelining(tmp_path / "pipelining.png", rows, swept).stat().st_size > 10_000


def test_the_published_charts_and_the_curve_are_two_files(tmp_path):
    seconds = {"single device": [4.0], "model parallel": [4.4], "20": [2.5], "12": [2.4]}
    rows = published_figures.tabulate(seconds, 120)
    drawn = published_figures.draw(rows, tmp_path, "two cores")
    assert [path.name for path in drawn] == ["published_bars.png", "published_splits.png"]
    assert all(path.stat().st_size > 10_000 for path in drawn)


def test_a_quick_run_does_not_touch_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    path = table.write("name", [{"a": 1}], quick=True, batch=3)
    assert path == tmp_path / "benchmarks-quick" / "name.csv"
    assert path.read_text().split() == ["a", "1"]
