"""From seconds to the rows of each benchmark's table."""

from dataclasses import asdict

import pytest

from benchmarks import ddp, gpt2, overhead, parity, pipelining, published_figures
from benchmarks.pipelining import Way
from models.gpt2 import gpt2 as chain_of_gpt2
from models.gpt2_sizes import SIZES


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


def test_every_batch_can_be_cut_into_its_chunks():
    for case in (*pipelining.CASES.values(), *pipelining.QUICK.values()):
        assert all(case.batch % chunks == 0 for chunks in (*case.chunks, *case.peer_chunks))
    assert all(120 % split == 0 for split in published_figures.SPLITS)


def test_replicas_are_compared_with_one_and_what_they_wait_for_is_all_reduce():
    seconds = {ddp.ONE: [1.0, 2.0], ddp.APART: [1.0, 2.0], "hidden": [1.0, 2.0], "exposed": [1.25, 2.5]}
    one, apart, hidden, exposed = ddp.tabulate(seconds, batch=8)
    assert (one["times one replica"], hidden["times one replica"]) == ("1.00", "2.00")
    assert (apart["all-reduce"], hidden["all-reduce"], exposed["all-reduce"]) == ("", "0.0%", "20.0%")


def test_parity_covers_every_model_and_every_strategy_that_can_differ():
    assert set(parity.models()) == {path.stem for path in (parity.ROOT / "conf" / "model").glob("*.yaml")}
    strategies = [layout[0].removeprefix("parallel=") for layout in parity.layouts()]
    assert strategies == ["ddp", "fsdp", "model_parallel", "hsdp", "pipelined", "pipe_ddp", "pipe_fsdp"]
    assert parity.layouts()[-1][1:] == ["parallel.dp=2", "parallel.pp=2", "parallel.schedule=1f1b"]
    assert ["parallel=hsdp", "parallel.dp=4", "parallel.shard=2"] in parity.layouts()


def test_published_figures_have_mean_and_spread_of_every_split():
    seconds = {"single device": [4.0, 4.0], "model parallel": [4.4, 4.4], "20": [2.0, 3.0]}
    *_, row = published_figures.tabulate(seconds, 120)
    assert (row["split size"], row["mean"], row["standard deviation"]) == (20, "2.500", "0.500")
    assert row["against single"] == "+60%"


@pytest.mark.parametrize("size", ["tiny", "124M"])
def test_flop_of_a_token_counts_the_models_own_parameters(size):
    skeleton = chain_of_gpt2(size=size, vocab_size=50304).skeleton()
    positions = next(p.numel() for name, p in skeleton.named_parameters() if name.endswith("wpe.weight"))
    parameters = sum(p.numel() for p in skeleton.parameters()) - positions
    attention = 12 * SIZES[size].n_layer * SIZES[size].n_embd * 256
    assert gpt2.flop_per_token(SIZES[size], 256, 50304) == 6 * parameters + attention


def test_each_lever_is_moved_alone():
    rows = gpt2.rows_to_measure(batch=8, gpu=True, compiler=True)
    best = asdict(rows.pop(gpt2.ALL))
    rows.pop("a tutorial's loop, fp32")
    for name, levers in rows.items():
        assert sum(asdict(levers)[key] != value for key, value in best.items()) == 1, name


def test_without_a_compiler_there_is_no_row_for_compile():
    rows = gpt2.rows_to_measure(batch=8, gpu=False, compiler=False)
    assert not any("compile" in name for name in rows)
    assert not any(levers.compiled for levers in rows.values())


def test_mfu_is_useful_work_over_the_peak():
    job = gpt2.Job("tiny", batch=8, tokens=64, steps=1, device="cpu")
    ways = {gpt2.ALL: gpt2.Levers(8)}
    work = 8 * 64 * gpt2.flop_per_token(SIZES["tiny"], 64, 50304)
    (row,) = gpt2.tabulate({gpt2.ALL: [2.0]}, ways, job, peak=work)
    assert (row["MFU"], row["tokens/s"]) == ("50.0%", "256")


def test_the_loop_and_the_bare_step_beside_it_are_both_measured():
    seconds = overhead.loop_and_bare(overhead.TINY, rounds=2)
    assert set(seconds) == {overhead.BARE, overhead.LOOP}
    assert all(len(times) == 2 and min(times) > 0 for times in seconds.values())
