"""Runs whose ranks share each layer: what they save, resume and start from, and what is said before they start."""

from __future__ import annotations

import pytest
import torch
from composed import compose, config, execute, for_rank, losses, run_layout, run_on_rank, saved
from slow_cases import with_slow

from common.errors import PlanError
from training.run.checks.model import across_nodes
from training.run.prepare import prepare

SHARED = ("tensor", "tensor sequence", "pipelined tp", "fsdp tp")


@pytest.fixture(scope="module")
def words(text):
    """GPT-2 of a vocabulary that two ranks do not divide."""
    return [
        "model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.n_head=2", *text,
        "data.vocabulary=words", "data.seq_len=16", "train.epochs=null", "train.steps=3", "train.global_batch_size=8",
        "train.precision=fp64", "train.eval_every=null", "scheduler=constant",
    ]  # fmt: skip


@pytest.fixture
def train(ranks, tmp_path, words):
    """``train("tensor", …)``: the folder of a run."""

    def begin(layout, *more):
        return run_layout(ranks, layout, tmp_path / f"{layout}-{len(list(tmp_path.iterdir()))}", *words, *more)

    return begin


def test_the_file_of_a_shared_layer_has_the_numbers_of_the_whole_one(train):
    """At a rate of zero the weights stay as they were drawn, whole, and were cut."""
    still = ["optim=sgd", "optim.lr=0", "train.steps=1"]
    alone = saved(train("single", *still), 1, "model")
    for layout in SHARED:
        cut = saved(train(layout, *still), 1, "model")
        assert cut.keys() == alone.keys()
        assert all(torch.equal(cut[name], alone[name]) for name in alone), layout


@pytest.mark.parametrize("layout", with_slow(SHARED, {*SHARED} - {"tensor sequence"}))
def test_a_run_resumes_with_the_same_bits(train, layout):
    every = ["train.checkpoint_every=2", "train.steps=4", "optim=adamw"]
    whole = train(layout, *every)
    again = train(layout, *every, f"train.resume='{whole}/checkpoints/step-00000002'")
    assert losses(again) == losses(whole)[2:]
    for kind in ("model", "optimizer"):
        ours, wanted = saved(again, 4, kind), saved(whole, 4, kind)
        assert all(torch.equal(ours[name], wanted[name]) for name in wanted)


def test_an_optimizer_of_whole_matrices_gets_them(train):
    alone = losses(train("single", "optim=muon"))
    for layout in ("tensor", "fsdp tp"):
        assert losses(train(layout, "optim=muon")) == pytest.approx(alone, rel=1e-12), layout


def test_a_model_starts_from_files_of_which_each_rank_reads_its_part(train, words):
    first = train("single", "optim=adamw")
    execute(config(*words, "mode=export", f"checkpoint='{first}'"), first, None)
    given = f"model.init_from='{first}/export'"
    alone = losses(train("single", given))
    for layout in SHARED:
        assert losses(train(layout, given)) == pytest.approx(alone, rel=1e-12), layout


def test_two_ranks_keep_half_of_what_one_keeps_and_the_summary_shows_it(ranks, words, tmp_path):
    kept = {}
    for size, layout in ((1, ["parallel=single"]), (2, ["parallel=tensor"])):
        more = ["data.vocabulary=gpt2", "train.checkpoint_every=null", *layout]
        kept[size] = ranks.run(size, run_on_rank, *for_rank(tmp_path / f"{size}", *words, *more))[0]
    assert (kept[1]["tp"], kept[2]["tp"]) == (1, 2)
    for kind in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert kept[2][kind] == pytest.approx([kept[1][kind][0] / 2] * 2, rel=0.05), kind


# -- before it starts ------------------------------------------------------------------------------------------------


def test_a_sequence_that_the_ranks_do_not_divide_is_refused_with_its_length(words):
    with pytest.raises(
        PlanError, match=r"parallel.tp=2 ranks, and there are sequences of 15 positions; set data.seq_l"
    ):
        prepare(config(*words, "data.seq_len=15", "parallel=tensor", "parallel.sequence=true"))
    assert prepare(config(*words, "data.seq_len=15", "parallel=tensor")).plan.tp == 2


def test_ranks_of_a_layer_on_several_nodes_are_a_warning_with_what_they_send(words):
    cfg = config(*words, "parallel=ddp", "parallel.dp=3", "parallel.tp=2", "train.global_batch_size=6")
    setup = prepare(cfg, world_size=6, nodes=2)
    assert "parallel.tp=2 ranks that share a layer lie on several of 2 nodes with 3 processes" in across_nodes(setup)
    assert "1 process each: every layer sends 0.0 MiB" in across_nodes(prepare(cfg, world_size=6, nodes=6))
    assert across_nodes(prepare(cfg, world_size=6, nodes=3)) is None
    assert across_nodes(prepare(cfg, world_size=6, nodes=1)) is None


def test_parallel_tensor_is_two_processes_unless_more_are_typed():
    assert compose("parallel=tensor").parallel.tp == 2
