"""No rank holds a layer that it does not run: seen in what each process really took."""

import pytest
from commandline import train

pytestmark = pytest.mark.slow  # gigabytes; estimates against a small run are in test_mode_plan
# 76 million parameters, 19 of them the embedding: with AdamW 1.2 GB, next to which two tiny sequences are nothing.
BIG = [
    "model=gpt2", "model.size=tiny", "model.n_embd=384", "model.n_layer=30", "data.seq_len=16", "device=cpu",
    "train.global_batch_size=4", "train.steps=2", "train.precision=fp32", "train.eval_every=null",
    "train.checkpoint_every=null", "logger=none",
]  # fmt: skip


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """Peak memory of each rank, above what a process of the toy model takes."""
    folder = tmp_path_factory.mktemp("memory")
    idle = train(["parallel=pipelined", "train.steps=2", "logger=none"], folder / "toy").summary
    base = max(idle["peak_memory_bytes"])
    single = train([*BIG, "parallel=single", "parallel.chunks=4"], folder / "single").summary
    pipelined = train([*BIG, "parallel=pipelined", "parallel.pp=4"], folder / "pipelined").summary
    return (
        single,
        pipelined,
        [[peak - base for peak in run["peak_memory_bytes"]] for run in (single, pipelined)],
    )


def test_each_rank_s_memory_is_that_of_its_stage(peaks):
    single, pipelined, ((whole,), ranks) = peaks
    assert whole > 16 * single["parameters"], "weights, gradients and two optimizer states of everything"
    for stage, peak in zip(pipelined["stages"], ranks, strict=True):
        share = stage["parameters"] / single["parameters"]
        assert 0.5 * share * whole < peak < (share + 0.25) * whole, (
            f"{stage['layers']}: {peak / 2**20:.0f} MiB"
        )


def test_the_ranks_of_a_pipeline_hold_the_model_once_and_the_tied_weight_twice(peaks):
    single, pipelined, _ = peaks
    held = sum(stage["parameters"] for stage in pipelined["stages"])
    assert held == single["parameters"] + 50304 * 384
    layers = [layer for stage in pipelined["stages"] for layer in stage["layers"]]
    assert layers == single["stages"][0]["layers"]
