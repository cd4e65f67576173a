"""Runs whose ranks share weights, gradients and optimizer state: what they keep, and what they save."""

import pytest
from composed import for_rank, losses, run_on_rank, saved

# 12 divides by 2, 3 and 4 replicas; micro-batches of 3 or fewer make no difference to the toy model.
TOY = [
    "train.epochs=null", "train.global_batch_size=12", "train.precision=fp64", "train.eval_every=null",
    "scheduler=constant", "optim=adamw", "optim.lr=1e-2",
]  # fmt: skip


@pytest.fixture
def train(ranks, tmp_path):
    """``train(2, …)``: the folder and the summary of a run on so many ranks, which share all."""

    def begin(replicas, *words):
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        layout = ["parallel=fsdp", f"parallel.dp={replicas}"] if replicas > 1 else []
        return folder, ranks.run(replicas, run_on_rank, *for_rank(folder, *words, *layout))[0]

    return begin


def test_a_run_resumes_with_the_same_bits_and_with_other_numbers_of_shards_to_rounding(train):
    whole, _ = train(2, *TOY, "train.steps=8", "train.checkpoint_every=4")
    again, _ = train(2, *TOY, "train.steps=8", f"train.resume='{whole}/checkpoints/step-00000004'")
    assert losses(again) == losses(whole)[4:]
    folder, _ = train(2, *TOY, "train.steps=2")
    for replicas, steps in ((4, 4), (3, 6), (1, 8)):
        folder, _ = train(replicas, *TOY, f"train.steps={steps}", f"train.resume='{folder}'")
        assert losses(folder) == pytest.approx(losses(whole)[steps - 2 : steps], rel=1e-10)
    for kind in ("model", "optimizer"):
        ours, wanted = saved(folder, 8, kind), saved(whole, 8, kind)
        assert ours.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (ours[name] - tensor).norm() <= 1e-10 * tensor.norm(), name


def test_four_ranks_keep_a_quarter_of_what_one_keeps_and_the_summary_shows_it(train, text):
    words = [
        "model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=64", *text, "train.global_batch_size=8",
        "train.precision=fp32", "train.epochs=null", "train.steps=1", "train.eval_every=null",
        "train.checkpoint_every=null",
    ]  # fmt: skip
    (_, one), (_, four) = train(1, *words), train(4, *words)
    assert (one["shards"], four["shards"]) == (1, 4)
    assert four["final_loss"] == pytest.approx(one["final_loss"], rel=1e-5)
    for kind in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert len(four[kind]) == 4
        assert four[kind] == pytest.approx([one[kind][0] / 4] * 4, rel=0.1), kind
