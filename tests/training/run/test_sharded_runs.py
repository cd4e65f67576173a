"""Runs whose ranks hold parts of the parameters or of each layer: what they keep, save, resume and start from."""

import pytest
import torch
from composed import LAYOUTS, compose, config, execute, for_rank, losses, run_layout, run_on_rank, same_bits, saved
from slow_cases import slow, with_slow

from common.errors import PlanError
from training.run.checks.model import across_nodes
from training.run.prepare import prepare

CUT = ("tensor", "tensor sequence", "pipelined tp", "fsdp tp")
FSDP_OF_3 = (3, ["parallel=fsdp", "parallel.dp=3"])


@pytest.fixture(scope="module")
def words(text):
    """GPT-2 of a vocabulary that two ranks do not divide."""
    return [
        "model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.n_head=2", *text,
        "data.vocabulary=words", "model.vocab_size=385", "data.seq_len=16", "train.epochs=null", "train.steps=3",
        "train.global_batch_size=8", "train.precision=fp64", "train.eval_every=null", "scheduler=constant",
    ]  # fmt: skip


@pytest.fixture
def train(ranks, tmp_path, words):
    """``train("tensor", …)``: the folder of a run."""
    return lambda layout, *more: run_layout(ranks, layout, tmp_path / f"{len(list(tmp_path.iterdir()))}", *words, *more)


@pytest.mark.parametrize("layout", with_slow(("fsdp", *CUT), {*CUT} - {"tensor sequence"}))
def test_a_run_resumes_with_the_same_bits(train, layout):
    every = ["train.checkpoint_every=2", "train.steps=4", "optim=adamw"]
    whole = train(layout, *every)
    again = train(layout, *every, f"train.resume='{whole}/checkpoints/step-00000002'")
    assert losses(again) == losses(whole)[2:] and same_bits(again, whole, 4)


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_shards(train):
    twelve = ["train.global_batch_size=12", "optim=adamw"]
    whole = train("fsdp", *twelve, "train.steps=6", "train.checkpoint_every=2", "train.keep_checkpoints=9")
    three = train(FSDP_OF_3, *twelve, "train.steps=4", f"train.resume='{whole}/checkpoints/step-00000002'")
    one = train("single", *twelve, "train.steps=6", f"train.resume='{three}'")
    assert losses(three) + losses(one) == pytest.approx(losses(whole)[2:], rel=1e-10)
    for kind in ("model", "optimizer"):
        ours, wanted = saved(one, 6, kind), saved(whole, 6, kind)
        torch.testing.assert_close(ours, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("layout", with_slow(("fsdp tp", "tensor"), ("tensor",)))
def test_an_optimizer_of_whole_matrices_gets_them(train, layout):
    assert losses(train(layout, "optim=muon")) == pytest.approx(losses(train("single", "optim=muon")), rel=1e-12)


@pytest.mark.parametrize("layouts", [CUT[-1:], slow(CUT[:-1])])
def test_a_model_starts_from_files_of_which_each_rank_reads_its_part_and_is_saved_as_by_one_process(
    train, words, layouts
):
    """At a rate of zero the weights stay as they were read, whole, and were cut."""
    first = train("single", "optim=adamw")
    execute(config(*words, "mode=export", f"checkpoint='{first}'"), first, None)
    still = [f"model.init_from='{first}/export'", "optim=sgd", "optim.lr=0", "train.steps=1"]
    alone = train("single", *still)
    for layout in layouts:
        run = train(layout, *still)
        assert losses(run) == pytest.approx(losses(alone), rel=1e-12) and same_bits(run, alone, 1), layout


@pytest.mark.parametrize(
    "layout, key", [((4, ["parallel=fsdp", "parallel.dp=4"]), "shards"), (LAYOUTS["tensor"], "tp")]
)
def test_ranks_keep_their_share_of_what_one_keeps_and_the_summary_shows_it(ranks, words, tmp_path, layout, key):
    more = ["data.vocabulary=gpt2", "model.vocab_size=50304", "train.checkpoint_every=null", "train.steps=1"]
    size, where = layout
    (one,) = ranks.run(1, run_on_rank, *for_rank(tmp_path / "one", *words, *more))
    shared, *_ = ranks.run(size, run_on_rank, *for_rank(tmp_path / "several", *words, *more, *where))
    assert (one[key], shared[key]) == (1, size)
    assert shared["final_loss"] == pytest.approx(one["final_loss"], rel=1e-10)
    for kind in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert shared[kind] == pytest.approx([one[kind][0] / size] * size, rel=0.1), kind


# -- before it starts ------------------------------------------------------------------------------------------------


def test_a_sequence_that_the_ranks_do_not_divide_is_refused_with_its_length(words):
    says = r"parallel.tp=2 ranks, and there are sequences of 15 positions; set data.seq_l"
    with pytest.raises(PlanError, match=says):
        prepare(config(*words, "data.seq_len=15", "parallel=tensor", "parallel.sequence=true"))
    assert prepare(config(*words, "data.seq_len=15", "parallel=tensor")).plan.tp == 2


def test_ranks_of_a_layer_on_several_nodes_are_a_warning_with_what_they_send(words):
    cfg = config(*words, "parallel=ddp", "parallel.dp=3", "parallel.tp=2", "train.global_batch_size=6")
    said = {nodes: across_nodes(prepare(cfg, world_size=6, nodes=nodes)) for nodes in (1, 2, 3, 6)}
    assert "parallel.tp=2 ranks that share a layer lie on several of 2 nodes with 3 processes" in said[2]
    assert "1 process each: every layer sends 0.0 MiB" in said[6] and said[1] is said[3] is None


def test_parallel_tensor_is_two_processes_unless_more_are_typed():
    assert compose("parallel=tensor").parallel.tp == 2
