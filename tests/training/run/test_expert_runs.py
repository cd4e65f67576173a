"""Runs in which ranks share experts, sequences, or both: checkpoints and optimizers go on in any other layout."""

import json

import pytest
import torch
from composed import losses, records, run_layout, saved

COMMON = ["model=transformers", "train.epochs=null", "train.global_batch_size=8", "train.precision=fp64"]
COMMON += ["train.eval_batches=2", "scheduler=constant", "model.vocabulary=words", "model.vocab_size=384"]
COMMON += ["train.grad_clip=0.5", "train.checkpoint_every=1", "train.keep_checkpoints=99", "data.seq_len=8"]
LAYOUTS = {
    "single": (1, ["parallel=single", "parallel.chunks=2"]),
    "two": (2, ["parallel=ddp", "parallel.dp=2", "parallel.ep=2"]),
    "four": (4, ["parallel=expert", "parallel.ep=4"]),
    "shards": (4, ["parallel=fsdp", "parallel.dp=4", "parallel.ep=2"]),
    "all shards": (2, ["parallel=fsdp", "parallel.dp=2", "parallel.ep=2"]),
    "stages": (4, ["parallel=pipe_ddp", "parallel.dp=2", "parallel.ep=2", "parallel.pp=2", "parallel.chunks=2"]),
    "sequences": (2, ["parallel=context", "parallel.cp=2", "parallel.context=ulysses"]),
    "sequences, stages": (4, ["parallel=pipelined", "parallel.pp=2", "parallel.cp=2", "parallel.chunks=2"]),
    "both": (4, ["parallel=expert", "parallel.ep=2", "parallel.cp=2", "parallel.context=ring"]),
    "both, shards": (8, ["parallel=fsdp", "parallel.dp=4", "parallel.ep=2", "parallel.cp=2"]),
}
OPTIMIZERS = {"adamw": ["optim=adamw", "optim.lr=1e-3"], "muon": ["optim=muon", "optim.lr=1e-3"]}


@pytest.fixture(scope="module")
def words(text, tmp_path_factory):
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
    sizes |= dict(moe_intermediate_size=12, intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    path = tmp_path_factory.mktemp("qwen3_moe") / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_moe", "max_position_embeddings": 64, **sizes}))
    return [f"model.config='{path}'", *text, *COMMON]


@pytest.mark.parametrize(
    "optimizer, layouts",
    [
        pytest.param("adamw", ["two", "single", "four", "shards", "stages"], marks=pytest.mark.slow),
        ("adamw", ["both", "single"]),
        pytest.param("adamw", ["both", "single", "sequences"], marks=pytest.mark.slow),
        pytest.param("adamw", ["all shards", "two", "shards"], marks=pytest.mark.slow),
        pytest.param("adamw", ["single", "both, shards", "four", "sequences, stages"], marks=pytest.mark.slow),
        pytest.param("muon", ["shards", "four", "single"], marks=pytest.mark.slow),
        pytest.param("muon", ["both", "sequences, stages", "single", "both, shards"], marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_in_any_layout(ranks, words, tmp_path, optimizer, layouts):
    """Each layout does one step, from the checkpoint of the one before. Checkpoints do not know of experts' ranks."""
    steps = len(layouts)
    words = [*words, *OPTIMIZERS[optimizer]]
    single = run_layout(ranks, LAYOUTS["single"], tmp_path / "whole", *words, f"train.steps={steps}")
    path, found = None, []
    for step, name in enumerate(layouts, 1):
        resumed = [f"train.resume='{path}'"] if path else []
        run = run_layout(ranks, LAYOUTS[name], tmp_path / str(step), *words, *resumed, f"train.steps={step}")
        path = run / "checkpoints" / f"step-{step:08d}"
        found += losses(run)
        for kind in ("model", "optimizer"):
            wanted, ours = saved(single, step, kind), saved(run, step, kind)
            assert ours.keys() == wanted.keys()
            for key, tensor in wanted.items():
                torch.testing.assert_close(ours[key], tensor, rtol=1e-10, atol=1e-12, msg=f"{name}: {key}")
    assert found == pytest.approx(losses(single), rel=1e-12)
    assert records(run)[-1]["val_loss"] == pytest.approx(records(single)[-1]["val_loss"], rel=1e-12)
