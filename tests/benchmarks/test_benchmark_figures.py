"""Figures are drawn from the rows of tables."""

from benchmarks import ddp, figure, gpt2, published_figures, table
from benchmarks.timing import Spread


def test_a_spread_comes_back_from_the_columns_it_was_written_to():
    spread = Spread(2.5, 2.25, 3.125)
    assert Spread.read(spread.columns()) == spread


def test_pipelining_draws_its_comparison_and_its_sweep_of_every_model(tmp_path):
    runs = {"single": "1.60x", "pipelined": "1.00x", "single, 2 threads": "0.96x", "torchgpipe": "2.10x"}
    rows = [
        {"model": model, "run": run, "pipelined is faster by": factor}
        for model in ("resnet50", "transformer")
        for run, factor in runs.items()
    ]
    swept = [
        {"model": model, "run": "pipelined", "schedule": "1f1b", "chunks": chunks, "seconds a step": "1.5"}
        for model in ("resnet50", "transformer")
        for chunks in (2, 4)
    ]
    figure.speed(tmp_path / "pipelining.png", rows)
    figure.chunks(tmp_path / "pipelining_sweep.png", swept)
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("pipelining", "pipelining_sweep"))


def test_the_published_curve_is_one_figure(tmp_path):
    seconds = {"single device": [4.0], "model parallel": [4.4], "20": [2.5], "12": [2.4]}
    rows = published_figures.tabulate(seconds, 120)
    published_figures.draw(tmp_path / "published.png", rows, "two cores")
    assert (tmp_path / "published.png").stat().st_size > 10_000


def test_titles_state_what_the_tables_show():
    replicas = [
        {"times one replica": "1.00", "all-reduce": ""},
        {"times one replica": "1.82", "all-reduce": "4.5%"},
        {"times one replica": "1.90", "all-reduce": "-0.7%"},
    ]
    assert ddp.title(replicas) == (
        "Two replicas do 1.82 to 1.90 times the work of one; waiting for the all-reduce takes at most 4.5 % of a step"
    )
    names = {"a tutorial's loop, fp32": 3.03, "all levers": 1, "without bf16": 2.92, "without fused AdamW": 1.02}
    levers = [
        {"run": name, "tokens/s": "641", "time against all levers": f"{value:.2f}x"} for name, value in names.items()
    ]
    assert gpt2.title(levers) == (
        "All levers: 641 tokens/s, 3.0 times as many as a tutorial's loop, fp32;\n"
        "a step takes 2.9 times as long without bf16, and at most 1.02 times in the other rows"
    )


def test_a_quick_run_does_not_touch_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    path = table.write("name", [{"a": 1}], quick=True, batch=3)
    assert path == tmp_path / "benchmarks-quick" / "name.csv"
    assert path.read_text().split() == ["a", "1"]
