"""Runs whose ranks share weights, gradients and optimizer state: what they keep, and what they save."""

import pytest
from composed import QUIET, compose, losses, run_on_rank, saved

from conf.instantiate import to_dict
from training.app import execute

# 12 divides by 2, 3 and 4 replicas; micro-batches of 3 or fewer make no difference to the toy model.
TOY = [
    "train.epochs=null", "train.global_batch_size=12", "train.precision=fp64", "train.eval_every=null",
    "scheduler=constant", "optim=adamw", "optim.lr=1e-2",
]  # fmt: skip


@pytest.fixture
def train(ranks, tmp_path):
    """``train(2, "parallel=fsdp", …)``: the folder and the summary of a run on so many ranks."""

    def begin(processes, *overrides):
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        tree = to_dict(compose(*QUIET, *overrides))
        return folder, ranks.run(processes, run_on_rank, tree, str(folder), str(folder / "meeting"))[0]

    return begin


def toy(train, replicas, *overrides):
    layout = ["parallel=fsdp", f"parallel.dp={replicas}"] if replicas > 1 else ["parallel=single"]
    return train(replicas, *TOY, *layout, *overrides)[0]


def test_a_run_resumes_with_the_same_bits_and_with_other_numbers_of_shards_to_rounding(train):
    whole = toy(train, 2, "train.steps=8", "train.checkpoint_every=4")
    again = toy(train, 2, "train.steps=8", f"train.resume='{whole}/checkpoints/step-00000004'")
    assert losses(again) == losses(whole)[4:]
    first, folder = toy(train, 2, "train.steps=2"), None
    for replicas, steps in ((4, 4), (3, 6), (1, 8)):
        folder = toy(train, replicas, f"train.steps={steps}", f"train.resume='{folder or first}'")
        assert losses(folder) == pytest.approx(losses(whole)[steps - 2 : steps], rel=1e-10)
    ends = [{kind: saved(run, 8, kind) for kind in ("model", "optimizer")} for run in (folder, whole)]
    for kind, wanted in ends[1].items():
        assert ends[0][kind].keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert (ends[0][kind][name] - tensor).norm() <= 1e-10 * tensor.norm(), name


@pytest.fixture
def gpt2(text):
    model = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=64", *text]
    return [*model, "train.global_batch_size=8", "train.precision=fp32", "train.epochs=null", "train.steps=1"]


def test_four_ranks_keep_a_quarter_of_what_one_keeps_and_the_summary_shows_it(train, gpt2):
    quiet = ["train.eval_every=null", "train.checkpoint_every=null"]
    _, one = train(1, *gpt2, *quiet)
    _, four = train(4, *gpt2, *quiet, "parallel=fsdp", "parallel.dp=4")
    assert (one["shards"], four["shards"]) == (1, 4)
    assert four["final_loss"] == pytest.approx(one["final_loss"], rel=1e-5)
    for kind in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert len(four[kind]) == 4
        assert four[kind] == pytest.approx([one[kind][0] / 4] * 4, rel=0.1), kind


def test_the_plan_shows_the_shares_and_what_is_whole_during_a_step(gpt2, tmp_path, capsys):
    def rows(*overrides):
        execute(compose(*QUIET, *gpt2, "mode=plan", "model.n_embd=512", *overrides), tmp_path, None)
        said = capsys.readouterr().out.splitlines()
        start = next(i for i, line in enumerate(said) if line.startswith("rank "))
        cells = [line.replace(",", "").split() for line in said[start + 1 : -1]]
        return [dict(zip(said[start].split()[1:-1], map(int, row[1:]), strict=True)) for row in cells]

    (one,) = rows("parallel=single")
    assert "gathered" not in one
    shares = rows("parallel=fsdp", "parallel.dp=4")
    assert len(shares) == 4
    for share in shares:
        for kind in ("weights", "gradients", "optimizer"):
            assert share[kind] == pytest.approx(one[kind] / 4, abs=1)
        assert 0 < share["gathered"] <= 2 * one["weights"] + 2
    hybrid = rows("parallel=hsdp", "parallel.dp=4", "parallel.shard=2")
    assert hybrid[0]["weights"] == pytest.approx(one["weights"] / 2, abs=1)
