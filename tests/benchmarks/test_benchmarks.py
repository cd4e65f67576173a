"""The runner, how contenders are timed, and how their seconds become the rows and the figures of each benchmark."""

import contextlib
import csv
import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as runner
from benchmarks import architectures, ddp, gpt2, overhead, parity, pipelining, published_figures
from benchmarks.pipelining import Way
from benchmarks.table import Benchmark, Table
from benchmarks.timing import Spread, paired, take_turns
from conf import options
from models.gpt2 import gpt2 as chain_of_gpt2
from models.gpt2_sizes import SIZES
from parallel.layout import Layout

# -- the runner ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *runner.NAMES])
def test_a_benchmark_explains_itself_and_refuses_unknown_arguments(name, capsys):
    for argument, code in (("--help", 0), ("--nonsense", 2)):
        with pytest.raises(SystemExit) as leaving:
            runner.run([*filter(None, [name]), argument])
        said = capsys.readouterr()
        assert leaving.value.code == code, said.err
        assert code or f"python -m benchmarks {name}".strip() in said.out
        assert code or name or all(f"\n{each} " in said.out for each in runner.NAMES)


def test_tables_go_to_the_results_and_those_of_a_quick_run_elsewhere(tmp_path, monkeypatch, capsys):
    def measure(chosen):
        yield Table("name", [{"a": len(chosen.parts), "b": chosen.rounds}], {"batch": 3})

    module = SimpleNamespace(__doc__="", BENCHMARK=Benchmark(measure, rounds=7, parts=("one", "two")))
    monkeypatch.setitem(sys.modules, "benchmarks.ddp", module)
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "TRIALS", tmp_path / "trials")
    for words, folder, row in (([], "results", "0,7"), (["one", "--quick"], "trials", "1,1")):
        runner.run(["ddp", *words])
        assert (tmp_path / folder / "name.csv").read_text().split() == ["a,b", row]
    about = json.loads((tmp_path / "results" / "name.json").read_text())
    assert about["batch"] == 3 and about["date"] and about["machine"]["packages"]["torch"]
    for words, count in ((["t"], 1), (["o", "t"], 2)):
        runner.run(["ddp", *words])
        assert (tmp_path / "results" / "name.csv").read_text().split() == ["a,b", f"{count},7"]
    with pytest.raises(SystemExit):
        runner.run(["ddp", "three"])
    assert "three is not one of the parts: one, two" in capsys.readouterr().err


def test_rows_that_were_measured_before_a_failure_stay(tmp_path):
    def rows():
        yield {"what": "first", "value": 1}
        raise RuntimeError("the GPU is gone")

    with pytest.raises(RuntimeError, match="the GPU is gone"):
        Table("name", rows()).write(tmp_path)
    assert (tmp_path / "name.csv").read_text().split() == ["what,value", "first,1"]


# -- timing --------------------------------------------------------------------------------------------------------


def test_contenders_take_turns_round_by_round_and_the_warm_up_is_not_in_the_times():
    calls = []
    contenders = {name: lambda number, name=name: calls.append((name, number)) for name in "ab"}
    seconds = take_turns(contenders, rounds=2, warm_up=1)
    assert calls == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)]
    assert [len(times) for times in seconds.values()] == [2, 2]
    calls.clear()
    take_turns({"a": contenders["a"]}, 1, 0, barrier=lambda: calls.append("barrier"))
    assert calls == ["barrier", ("a", 1), "barrier"]


def test_a_spread_is_the_median_and_both_ends_and_comes_back_from_its_columns():
    spread = Spread.of([3.125, 2.25, 2.5])
    assert spread == Spread(median=2.5, fastest=2.25, slowest=3.125) == Spread.read(spread.columns())


def test_ratios_are_taken_within_a_round_where_noise_is_the_same():
    # The machine was ten times as slow in the second round, for both.
    assert paired({"fast": [1.0, 10.0, 1.0], "slow": [2.0, 20.0, 2.0]}, "fast", "slow") == 2.0


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# -- from seconds to rows ------------------------------------------------------------------------------------------


def test_each_contender_of_pipelining_is_compared_with_the_best_pipeline():
    best = Way("pipelined", 6, "1f1b", (12, 10))
    # Each group is compared with its own measurement of the pipeline: the second one's hour was slower.
    groups = [{Way("single"): [4.0] * 3, best: [2.0] * 3}, {Way("pipelined"): [8.8] * 3, best: [4.0] * 3}]
    single, ours, naive = pipelining.final_rows(groups, 60)
    assert [row["run"] for row in (single, naive, ours)] == ["single", "naive", "pipelined"]
    assert [row["pipelined is faster by"] for row in (single, naive, ours)] == ["2.00x", "2.20x", "1.00x"]
    assert ours["split"] == "12+10" and ours["samples/s"] == "30.00"


def test_a_way_is_named_by_what_sets_it_apart():
    assert Way("single", threads=2).name == "single, 2 threads"
    assert Way("pipelined", 4, precision="bf16").name == "pipelined, bf16"
    assert (Way("fairscale").name, Way("fairscale", tuned=True).name) == ("fairscale", "fairscale, tuned")


def test_replicas_are_compared_with_one_and_what_they_wait_for_is_all_reduce():
    seconds = {ddp.ONE: [1.0, 2.0], ddp.APART: [1.0, 2.0], "hidden": [1.0, 2.0], "exposed": [1.25, 2.5]}
    one, apart, hidden, exposed = ddp.rows_of(seconds, batch=8)
    assert (one["times one replica"], hidden["times one replica"]) == ("1.00", "2.00")
    assert (apart["all-reduce"], hidden["all-reduce"], exposed["all-reduce"]) == ("", "0.0%", "20.0%")


def test_parity_has_a_row_for_every_layout_with_all_that_was_compared(monkeypatch, tmp_path):
    certificate = {
        "parameters": 7,
        "limits": {"loss": 1e-5, "gradients": 1e-5},
        "layouts": [
            {"name": "parallel=ddp dp=2", "holds": True, "differences": {"loss": [0.0, ""]}},
            {"name": "parallel=data_parallel", "holds": None, "differences": {}},
        ],
    }
    (tmp_path / "certificate.json").write_text(json.dumps(certificate))
    monkeypatch.setattr(parity, "run_directory", lambda *words: contextlib.nullcontext(tmp_path))
    (row,) = parity.rows("toy")
    assert row == {
        "model": "toy", "parameters": 7, "run": "parallel=ddp dp=2", "loss": "0e+00", "gradients": "0e+00",
    }  # fmt: skip
    assert set(parity.SIZES) < set(options("model"))


@pytest.mark.slow
def test_parity_has_rows_of_ranks_that_share_sequences_and_experts():
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    (row,) = parity.shared_rows("moe", [Layout("expert", dp=2, ep=2, cp=2, context="ring", chunks=2)])
    assert row["run"] == "parallel=expert dp=2 cp=2 context=ring ep=2"
    assert all(float(row[kind]) <= 1e-12 for kind in ("loss", "gradients", "optimizer", "next step", "evaluation"))


@pytest.mark.slow
def test_an_architecture_has_a_row_of_layouts_and_one_of_seconds(tmp_path):
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    runner.run(["architectures", "--quick", "--output", str(tmp_path)])
    (verified,) = read_csv(tmp_path / "architectures.csv")
    assert verified["layouts"] == "1 of 1" and float(verified["largest difference"]) < 1e-9, verified
    (timed,) = read_csv(tmp_path / "architectures_speed.csv")
    assert timed["architecture"] == "qwen3" and timed["the chain takes"].endswith("x")


def test_an_architecture_that_cannot_be_cut_has_a_row_with_the_reason():
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    (kind,) = architectures.REFUSED
    row = architectures.verified(kind)
    assert row["layouts"] == "0 of 6" and "BloomForCausalLM cannot be cut into layers" in row["why not"]


def test_published_figures_have_mean_and_spread_of_every_split_and_are_one_curve(tmp_path):
    seconds = {"single device": [4.0, 4.0], "model parallel": [4.4, 4.4], "12": [2.4, 2.4], "20": [2.0, 3.0]}
    rows = published_figures.rows_of(seconds, 120)
    row = rows[-1]
    assert (row["split size"], row["mean"], row["standard deviation"]) == (20, "2.500", "0.500")
    assert row["against single"] == "+60%"
    published_figures.draw(tmp_path / "published.png", rows, "two cores")
    assert (tmp_path / "published.png").stat().st_size > 10_000


@pytest.mark.parametrize("size", ["tiny", "124M"])
def test_flop_of_a_token_counts_the_models_own_parameters(size):
    skeleton = chain_of_gpt2(size=size, vocab_size=50304).skeleton()
    positions = next(p.numel() for name, p in skeleton.named_parameters() if name.endswith("wpe.weight"))
    parameters = sum(p.numel() for p in skeleton.parameters()) - positions
    attention = 12 * SIZES[size].n_layer * SIZES[size].n_embd * 256
    assert gpt2.flop_per_token(SIZES[size], 256, 50304) == 6 * parameters + attention


def test_each_lever_is_moved_alone_and_compile_only_where_it_works():
    job = gpt2.Job("tiny", batch=8, tokens=64, steps=1, device="cuda", microbatch=8)
    rows = gpt2.rows_to_measure(job, compiler=True)
    best = asdict(rows.pop(gpt2.ALL))
    rows.pop("a tutorial's loop, fp32")
    for name, way in rows.items():
        assert sum(asdict(way)[key] != value for key, value in best.items()) == 1, name
    rows = gpt2.rows_to_measure(job, compiler=False)
    assert not any("compile" in name or way.compiled for name, way in rows.items())


def test_mfu_is_useful_work_over_the_peak():
    job = gpt2.Job("tiny", batch=8, tokens=64, steps=1, device="cpu", microbatch=8)
    work = 8 * 64 * gpt2.flop_per_token(SIZES["tiny"], 64, 50304)
    seconds = {"a tutorial's loop, fp32": [6.06], gpt2.ALL: [2.0], "without bf16": [5.84], "micro-batch 4": [2.04]}
    rows = gpt2.rows_of(seconds, dict.fromkeys(seconds, job), peak=work)
    assert (rows[1]["MFU"], rows[1]["tokens/s"]) == ("50.0%", "256")
    assert [row["time against all levers"] for row in rows] == ["3.03x", "1.00x", "2.92x", "1.02x"]


def test_the_loop_and_the_bare_step_beside_it_are_both_measured():
    seconds = overhead.loop_and_bare(overhead.TINY, rounds=2)
    assert set(seconds) == {overhead.BARE, overhead.LOOP}
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())


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
    pipelining.draw_speed(tmp_path / "pipelining.png", rows)
    pipelining.draw_sweep(tmp_path / "pipelining_sweep.png", swept)
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("pipelining", "pipelining_sweep"))
