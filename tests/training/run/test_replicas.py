"""Ranks that hold the same weights are compared: replicas that start apart would stay apart."""

import re
from pathlib import Path

import pytest
from apart import run_with_own
from composed import LAYOUTS, config, execute, for_rank, losses, run, run_layout, saved

TOY = ["train.epochs=null", "train.steps=4", "train.precision=fp64", "train.eval_every=null"]
GPT2 = ["model=gpt2", "model.n_layer=2", "model.n_embd=32", "model.n_head=2", "model.vocab_size=384", *TOY]


@pytest.fixture(scope="module")
def exports(text, tmp_path_factory):
    """``exports("toy")``: the words of a run, and the folders of two exports of the same shapes."""
    folder, made = tmp_path_factory.mktemp("exports"), {}
    gpt2 = [*GPT2, *text, "data.vocabulary=words", "data.seq_len=16", "train.global_batch_size=8"]
    recipes = {"toy": TOY, "gpt2": gpt2}

    def get(name):
        for seed in (1, 2) if name not in made else ():
            words, where = [*recipes[name], f"seed={seed}", "train.steps=1"], folder / f"{name}-{seed}"
            run(where, *words)
            execute(config(*words, "mode=export", f"checkpoint='{where}'"), where, None)
            made.setdefault(name, []).append(str(where / "export"))
        return recipes[name], made[name]

    return get


def start_apart(ranks, exports, folder, name, layout, *others, **options):
    """The ranks ``others`` read the second of two exports under the name of the first."""
    words, (usual, other) = exports(name)
    size, where = LAYOUTS[layout]
    weights = [other if rank in others else usual for rank in range(size)]
    return ranks.run(size, run_with_own, *for_rank(folder, *words, *where), "model.init_from", weights, **options)


@pytest.mark.parametrize("layout, other", [("ddp", 1), ("pipe_ddp", 2)])
def test_machines_with_other_weights_under_the_same_name_do_not_train_together(ranks, exports, tmp_path, layout, other):
    first = "0, 1, 3" if other == 2 else "0"
    differs = rf"model.init_from: \w{{12}} on ranks? {first} \(.*\), \w{{12}} on rank {other} \("
    with pytest.raises(AssertionError, match=rf"LaunchError: the ranks do not run the same: {differs}"):
        start_apart(ranks, exports, tmp_path, "toy", layout, other)


APART = [
    ("toy", "ddp", [1], "net1.bias"),
    ("toy", "pipe_ddp", [1], "net1.bias"),  # pp_dp: ranks 0 and 1 have the first stage
    ("toy", "hsdp", [3], r"net1.bias \(share 1\)"),
    ("gpt2", "pipelined", [1], "embedding.wte.weight"),  # a copy in each stage
]


@pytest.mark.parametrize("name, layout, others, what", APART)
def test_weights_that_are_not_equal_end_the_run_before_its_first_step(
    ranks, exports, tmp_path, name, layout, others, what
):
    (other,) = others
    with pytest.raises(AssertionError) as ended:
        start_apart(ranks, exports, tmp_path, name, layout, other, unseen=True)
    said = re.search(r"TrainingError: (.*)", str(ended.value))[1]
    first = {3: 1}.get(other, 0)
    assert re.search(rf"the same weights: {what}: \w{{12}} on rank {first} \(.*\), \w{{12}} on rank {other} \(", said)
    assert "launcher.allow_mixed=true" in said
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_checkpoint_that_is_another_one_on_some_machine_is_not_loaded(ranks, exports, tmp_path):
    words, folders = exports("toy")
    size, where = LAYOUTS["pipelined"]
    checkpoints = [f"{Path(folder).parent}/checkpoints/latest" for folder in folders]
    args = for_rank(tmp_path, *words, *where, "mode=eval")
    with pytest.raises(AssertionError, match="CheckpointError: .* is another checkpoint on rank 1 than on rank 0"):
        ranks.run(size, run_with_own, *args, "checkpoint", checkpoints)


DRIFT = """
import torch


class Drift:
    def on_step(self, run, record):
        if run.step == 3 and run.strategy.mesh.rank == 1:
            with torch.no_grad():
                next(run.strategy.parameters()).mul_(1 + 1e-12)
"""


@pytest.mark.slow
def test_replicas_that_have_come_apart_end_the_run_once_what_was_trained_is_saved(ranks, tmp_path):
    (tmp_path / "drifting.py").write_text(DRIFT)
    own = [f"import_from=['{tmp_path}']", "callbacks=[{_target_: drifting.Drift}]", "train.checkpoint_every=2"]
    with pytest.raises(AssertionError, match=r"TrainingError: .* net1.weight: \w+ on rank 0 \(.*, \w+ on rank 1 \("):
        run_layout(ranks, "ddp", tmp_path / "run", *TOY, *own)
    assert saved(tmp_path / "run", 4) and not (tmp_path / "run/summary.json").exists()
    own.append("launcher=slurm")  # of several machines
    run_layout(ranks, "ddp", tmp_path / "mixed", *TOY, *own, "launcher.allow_mixed=true")
    assert len(losses(tmp_path / "mixed")) == 4
