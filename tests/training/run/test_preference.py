"""Preference tuning by DPO in whole runs: beside trl, in every layout, resumed, and what is left of it afterwards."""

import json
import math

import pytest
import torch
from commandline import records
from composed import again, config, losses, run, run_layout, saved
from hugging_face import EXPERTS, make_folder, write_pairs
from safetensors.torch import load_file

from common.errors import TrainingError
from common.packages import load_torchvision
from conf.instantiate import to_dict
from training.command.modes.export import export
from training.command.modes.sample import sample
from training.run.prepare import model_and_data, prepare
from training.run.rank import run as training

STEPS = [
    "train.epochs=null",
    "train.steps=4",
    "train.checkpoint_every=2",
    "train.precision=fp32",
    "train.grad_clip=null",
]
pytestmark = pytest.mark.slow
METRICS = ("rewards_chosen", "rewards_rejected", "margin", "accuracy")
LORA = ["model.lora.rank=4", "model.lora.targets=[q_proj,down_proj]"]
KINDS = {"all weights": [], "adapters": [*LORA, "model.lora.dora=true", "model.lora.modules_to_save=[lm_head]"]}
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama, and the rows of pairs beside it."""
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    made = make_folder(tmp_path_factory.mktemp("published"), tie_word_embeddings=False)
    write_pairs(made / "pairs")
    return made


def words(folder, *more, model="llama"):
    data = ["data=jsonl", f"data.root='{folder}/pairs'", "data.chosen=chosen", "data.rejected=rejected"]
    size = ["data.seq_len=48", "train.global_batch_size=8", "optim=sgd", "optim.lr=0.05", "optim.momentum=0"]
    start = [f"model={model}", f"model.init_from='{folder}'", "model.loss=dpo", "scheduler=constant"]
    return [*start, *data, *size, *STEPS, *more]


@pytest.fixture(scope="module", params=KINDS)
def tuned(request, folder, tmp_path_factory):
    """Four steps of ``single``."""
    where = tmp_path_factory.mktemp("tuned")
    run(where, *words(folder, *KINDS[request.param], "parallel.chunks=4"))
    return where


def steps_of(folder):
    return [record for record in records(folder) if "loss" in record]


def test_a_run_reports_rewards_and_no_perplexity(tuned):
    steps = steps_of(tuned)
    assert steps[0]["loss"] == pytest.approx(math.log(2)) and steps[0]["margin"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[-1]["accuracy"] > 0.5
    assert all(
        one["margin"] == pytest.approx(one["rewards_chosen"] - one["rewards_rejected"], abs=1e-6) for one in steps
    )
    assert {f"val_{name}" for name in METRICS} <= {key for record in records(tuned) for key in record}
    assert "perplexity" not in str(records(tuned)) and "tokens_per_s" not in steps[0]


def test_what_is_left_is_the_tuned_model_without_its_reference(tuned, folder, tmp_path):
    assert not any("reference" in name for name in (*saved(tuned, 4), *saved(tuned, 4, "optimizer")))
    export(again(tuned, "mode=export", "export_to=whole"), tmp_path)
    exported, begun = (load_file(where / "model.safetensors") for where in (tmp_path / "whole", folder))
    assert exported.keys() == begun.keys() and not torch.equal(exported["lm_head.weight"], begun["lm_head.weight"])
    assert sample(again(tuned, "mode=sample", "sample.tokens=3", "sample.prompt=Ann")).startswith("Ann")
    prepare(config(*words(tmp_path / "whole", f"data.root='{folder}/pairs'")))
    (tmp_path / "eval").mkdir()
    evaluated = training(prepare(again(tuned, "mode=eval")), tmp_path / "eval")["best_val_loss"]
    assert evaluated == pytest.approx(json.loads((tuned / "summary.json").read_text())["best_val_loss"])
    with pytest.raises(TrainingError, match="was trained on the base sha256="):
        prepare(again(tuned, "mode=eval", f"model.init_from='{tmp_path}/whole'"))


def resumed(ranks, tuned, layout, where, *more):
    """Steps 3 and 4 once more, in another layout."""
    tree = to_dict(again(tuned, f"train.resume='{tuned / 'checkpoints' / 'step-00000002'}'", *more))
    sections = {key: tree[key] for key in ("model", "data", "train", "optim", "scheduler")}
    run_layout(ranks, layout, where, f"model={tree['model']['name']}", **sections)
    return where


def assert_goes_on(ours, tuned):
    assert losses(ours) == pytest.approx(losses(tuned)[2:], rel=1e-5)
    weights, wanted, before = saved(ours, 4), saved(tuned, 4), saved(tuned, 2)
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (weights[name] - tensor).norm() <= 1e-4 * (tensor - before[name]).norm() + 1e-7, name


@pytest.mark.parametrize("layout", ["ddp", "pipelined", "pipe_fsdp", "tensor", "tensor sequence"])
def test_another_layout_goes_on_with_the_same_losses(ranks, tuned, layout, tmp_path):
    assert_goes_on(resumed(ranks, tuned, layout, tmp_path / "run"), tuned)


MODELS = {  # and a layout of each
    "gpt2": ("tensor", ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.dropout=0.1", "model.lora.rank=2"]),
    "Gemma2": ("pipelined", {"head_dim": 12, "sliding_window": 8}),  # a head that is called without the loss
    "Mixtral": ("ddp", {**EXPERTS, "output_router_logits": True}),  # an auxiliary loss, of the tuned model only
}


@pytest.mark.parametrize("name", MODELS)
def test_other_models_are_tuned_alike_in_layouts(ranks, folder, name, tmp_path):
    layout, model = MODELS[name]
    if isinstance(model, dict):
        made = make_folder(tmp_path / "made", name, num_hidden_layers=2, **model)
        model = ["model=transformers", f"model.init_from='{made}'"]
    line = [word for word in words(folder, *model, "train.steps=3") if not word.endswith(("=llama", f"'{folder}'"))]
    run(tmp_path / "one", *line, "parallel.chunks=4")
    run_layout(ranks, layout, tmp_path / "other", *line)
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trl_s(folder, kind, tmp_path):
    """Losses, rewards and norms of gradients of steps of one batch of chats; trl's first adapters are ours."""
    trl = pytest.importorskip("trl", reason="trl is a test dependency (requirements-dev.txt)")
    load_torchvision()
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in (folder / "pairs" / "train.jsonl").read_text().splitlines()[:8]]
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    chats = [{key: [{"role": role, "content": row[key]}] for key, role in roles.items()} for row in rows]
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    more = ["data.messages=prompt", "model.dpo.beta=0.3", "optim.lr=0.1", "parallel.chunks=2", *KINDS[kind]]
    run(tmp_path / "run", *words(folder, f"data.root='{tmp_path}'", *more))

    args = {"bf16": False, "use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    args |= {"per_device_train_batch_size": 8, "max_steps": 4, "logging_steps": 1, "max_length": 49, "beta": 0.3}
    args |= {"learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0}
    lora = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "down_proj"], "use_dora": True}
    lora |= {"modules_to_save": ["lm_head"]}
    trainer = trl.DPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        args=trl.DPOConfig(str(tmp_path / "trl"), **args),
        train_dataset=Dataset.from_list(chats),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(**lora) if KINDS[kind] else None,
    )
    cfg, chain, _ = model_and_data(again(tmp_path / "run", "mode=export"))
    ours = chain.build(chain.names, cfg.seed, torch.device("cpu")).state_dict()
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if ".lora_A." in name:
                parameter.copy_(ours[name.removeprefix("base_model.model.model.").replace(".default", "")])
    trainer.train()
    theirs = [record for record in trainer.state.log_history if "rewards/margins" in record]
    named = {"loss": "loss", "grad_norm": "grad_norm", **dict(zip(METRICS, REWARDS, strict=True))}
    for our, their in zip(steps_of(tmp_path / "run"), theirs, strict=True):
        assert {name: our[name] for name in named} == pytest.approx(
            {name: their[key] for name, key in named.items()}, rel=1e-4, abs=1e-6
        )
