"""LoRA in whole runs: checkpoints of adapters, the base that they belong to, and what other programs read."""

import json
import shutil
from types import SimpleNamespace

import hugging_face
import pytest
import torch
from composed import again, config, losses, run, run_layout, saved
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError, TrainingError
from common.packages import load_transformers
from conf.instantiate import to_dict
from conf.words import quote_value
from data.tensors import TensorData
from models.gpt2 import gpt2
from models.losses import ClassCrossEntropy
from models.sequential import chain_of
from planner.memory import memory_of_ranks
from training import train, verify
from training.command.modes.export import export
from training.command.modes.sample import sample
from training.export.write import write_adapters
from training.run.prepare import build_chain, prepare
from training.run.rank import run as training
from training.run.restore import restore

LORA = ["model.lora.rank=4", "model.lora.targets=[c_attn,mlp.c_proj]"]
TOKENS = torch.randint(0, 50257, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def recipe(text):
    sizes = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.dropout=0.1"]
    length = ["train.steps=4", "train.global_batch_size=8", "train.precision=fp32", "train.eval_batches=1"]
    return [*sizes, *text, *length, "optim=adamw", "optim.lr=0.02", "scheduler=constant", "model.lora.dropout=0.1"]


@pytest.fixture(scope="module")
def trained(recipe, published, tmp_path_factory):
    """Four steps of ``single`` from the published base."""
    folder = tmp_path_factory.mktemp("trained")
    run(folder, *recipe, *LORA, f"model.init_from='{published}'", "train.checkpoint_every=2", "parallel.chunks=4")
    return folder


@pytest.fixture(scope="module")
def of_transformers(rows, tmp_path_factory):
    """The same of a Gemma 2, by the code of transformers."""
    folder = tmp_path_factory.mktemp("of_transformers")
    base = hugging_face.make_folder(folder / "base", "Gemma2", head_dim=12, sliding_window=8)
    words = hugging_face.words(base, rows, model="transformers")
    recipe = ["train.epochs=null", "train.steps=4", "train.precision=fp32", "train.eval_batches=1", "optim.lr=2e-3"]
    lora = ["model.lora.rank=4", "model.lora.targets=[q_proj,v_proj]", "train.checkpoint_every=2", "parallel.chunks=4"]
    run(folder / "run", *words, *recipe, "optim=adamw", "optim.eps=1e-5", *lora)
    return folder / "run"


ADAPTED = pytest.mark.parametrize(
    "kind, count", [("trained", 2), pytest.param("of_transformers", 4, marks=pytest.mark.slow)]
)


@ADAPTED
def test_a_checkpoint_holds_what_was_trained_and_nothing_else(request, kind, count):
    trained = request.getfixturevalue(kind)
    weights, states = saved(trained, 4), saved(trained, 4, "optimizer")
    assert len(weights) == count * 2 * 2 and all(".lora_" in name for name in weights)
    assert {name.partition("/")[0] for name in states} == weights.keys()
    assert not any(torch.equal(weights[name], tensor) for name, tensor in saved(trained, 2).items())


@ADAPTED
def test_another_layout_goes_on_with_the_same_losses(ranks, request, kind, count, tmp_path):
    trained = request.getfixturevalue(kind)
    tree = to_dict(again(trained, "train.steps=4", f"train.resume='{trained / 'checkpoints' / 'step-00000002'}'"))
    sections = {key: tree[key] for key in ("model", "data", "train", "optim", "scheduler")}
    run_layout(ranks, "pipe_fsdp", tmp_path / "run", f"model={tree['model']['name']}", **sections)
    assert losses(tmp_path / "run") == pytest.approx(losses(trained)[2:], rel=1e-5)
    ours, wanted = saved(tmp_path / "run", 4), saved(trained, 4)
    assert all((ours[name] - tensor).norm() <= 1e-4 * tensor.norm() for name, tensor in wanted.items())


@ADAPTED
def test_an_evaluation_has_the_trained_model_s_loss(request, kind, count, tmp_path):
    trained = request.getfixturevalue(kind)
    cfg = again(trained, "mode=eval", "train.eval_batches=1")
    (tmp_path / "eval").mkdir()
    evaluated = training(prepare(cfg), tmp_path / "eval")["best_val_loss"]
    assert evaluated == pytest.approx(json.loads((trained / "summary.json").read_text())["best_val_loss"])
    assert isinstance(sample(again(trained, "mode=sample", "sample.tokens=3", "sample.prompt=def")), str)


def test_another_base_is_refused_and_the_same_one_elsewhere_is_not(trained, published, recipe, tmp_path):
    moved = shutil.copytree(published, tmp_path / "moved")
    here = f"model.init_from='{moved}'"
    prepare(again(trained, "mode=eval", here))
    state = load_file(moved / "model.safetensors")
    state["transformer.h.0.ln_1.bias"] += 1e-3
    save_file(state, moved / "model.safetensors", metadata={"format": "pt"})
    for words in (["mode=eval"], [f"train.resume='{trained}'", "train.steps=9"]):
        with pytest.raises(TrainingError, match=r"trained on the base sha256=\w+, but model.init_from=.*gives sha256="):
            prepare(again(trained, *words, here))
    for mode, act in (("export", lambda cfg: export(cfg, tmp_path)), ("sample", sample)):
        with pytest.raises(TrainingError, match="trained on the base"):
            act(again(trained, f"mode={mode}", here))
    run(tmp_path / "drawn", *recipe, *LORA, "train.steps=1")
    with pytest.raises(TrainingError, match="trained on the base seed=1337, but .* gives seed=3"):
        prepare(again(tmp_path / "drawn", "mode=eval", "seed=3"))


def test_all_weights_trained_are_no_adapters(trained, recipe, tmp_path):
    run(tmp_path / "full", *recipe, "train.steps=1")
    assert "embedding.wte.weight" in saved(tmp_path / "full", 1)
    assert again(tmp_path / "full", "mode=eval").model.lora.base is None
    manifest = json.loads((tmp_path / "full" / "checkpoints" / "latest" / "manifest.json").read_text())
    assert "lora" not in str(manifest["progress"]["recipe"]), "older checkpoints, which have none, are gone on from"
    with pytest.raises(CheckpointError, match="lora_A.weight is not in it; model.lora="):
        prepare(again(tmp_path / "full", "mode=eval", "model.lora.rank=4"))


def assert_exports_compute_what_the_adapters_compute(run_dir, published, tmp_path, words=50257):
    peft = pytest.importorskip("peft", reason="peft is a test dependency (requirements-dev.txt)")
    from transformers import AutoModelForCausalLM

    export(again(run_dir, "mode=export", "export_to=merged"), tmp_path)
    said = export(again(run_dir, "mode=export", "export_to=adapters", "export.format=peft"), tmp_path)
    assert "adapter_config.json, adapter_model.safetensors" in said
    (stage,) = restore(again(run_dir, "mode=export"), "cpu").strategy.stages
    base, tokens = AutoModelForCausalLM.from_pretrained(published), TOKENS % words
    with torch.no_grad():
        ours, before = stage.eval().layers(tokens)[..., :words], base(tokens).logits[..., :words]
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(tokens).logits[..., :words]
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()(tokens).logits[..., :words]
    assert (ours - before).abs().max() > 0.1, "the adapters do something"
    assert (merged - ours).abs().max() < 1e-4 and (adapted - ours).abs().max() < 1e-4
    assert "lora" not in "".join(load_file(tmp_path / "merged" / "model.safetensors"))


@pytest.mark.slow
def test_exports_compute_what_the_adapters_compute(trained, published, tmp_path):
    assert_exports_compute_what_the_adapters_compute(trained, published, tmp_path)


def test_so_do_those_of_the_llama_family(text, tmp_path):
    hugging_face.make_folder(tmp_path / "base", vocab_size=384, num_hidden_layers=2, max_position_embeddings=256)
    (tmp_path / "base" / "tokenizer.json").unlink()  # the tokens are the words of the text
    words = ["model=llama", f"model.init_from='{tmp_path}/base'", "model.tokenizer=null", *text, "train.precision=fp32"]
    words += ["data.vocabulary=words", "train.steps=4", "train.global_batch_size=8", "train.eval_batches=1"]
    lora = ["model.lora.rank=4", "model.lora.targets=null", "model.lora.dora=true"]
    lora += ["model.lora.modules_to_save=[lm_head,layers.1.mlp]"]  # the head is tied to the embedding
    run(tmp_path / "run", *words, "optim.lr=0.02", "scheduler=constant", *lora)
    weights = saved(tmp_path / "run", 4)
    assert {name.split(".lora_")[0].split(".")[-1] for name in weights if "lora" in name} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert {name for name in weights if "lora" not in name} == {
        "embedding.embed_tokens.weight", *(f"layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    }  # fmt: skip
    assert_exports_compute_what_the_adapters_compute(tmp_path / "run", tmp_path / "base", tmp_path, words=300)


@pytest.mark.parametrize(
    "words, says",
    [
        (["model.lora.rank=4"], "model.lora.rank=4 and model.init_from=None. The other formats"),
        ([], "model.lora.rank=None and model.init_from=None"),
    ],
)
def test_adapters_that_no_one_can_load_are_not_exported(tmp_path, words, says):
    with pytest.raises(TrainingError, match=says):
        export(config("model=toy", *words, "mode=export", "export.format=peft", "checkpoint=none"), tmp_path)


def test_new_tokens_are_refused_as_their_rows_would_not_be_trained(recipe):
    extra = quote_value('model.extra_tokens={"<a>": null}')
    with pytest.raises(TrainingError, match="model.extra_tokens with model.lora.rank"):
        prepare(config(*recipe, *LORA, extra))


@pytest.mark.parametrize("layout", ["parallel=single", "parallel=pipe_fsdp"])
def test_the_plan_counts_gradients_and_optimizer_state_of_what_is_trained(recipe, layout):
    def estimated(*words):
        setup = prepare(config(*recipe, layout, *words))
        return setup.plan, memory_of_ranks(setup.plan, setup.work[0], states=2)

    (plan, lora), (whole, full) = estimated("model.lora.rank=4"), estimated()
    assert plan.frozen == whole.parameters and plan.parameters == 2 * 4 * (4 * 32 + 2 * 32 + 5 * 32 + 5 * 32)
    for ours, theirs in zip(lora, full, strict=True):
        assert theirs.weights < ours.weights < 1.1 * theirs.weights
        assert ours.optimizer == 2 * ours.gradients and ours.gradients < 0.1 * theirs.gradients
        assert ours.gathered <= 0.6 * theirs.gathered


@pytest.mark.slow
def test_a_model_of_a_program_is_adapted_and_verified(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    given = {"model": chain_of(net, ClassCrossEntropy()), "data": TensorData(torch.randn(32, 8), torch.arange(32) % 3)}
    words = ["logger=none", "device=cpu", "train.precision=fp64", "train.global_batch_size=8", "model.lora.rank=2"]
    result = train(*words, "train.steps=2", f"hydra.run.dir={tmp_path}/run", **given)
    assert result.summary["parameters"] == 2 * (8 + 8 + 8 + 3)
    layout = ["parallel=pipe_fsdp", "parallel.dp=2", "parallel.pp=2", "verify.steps=2"]
    report = verify(*words, *layout, f"hydra.run.dir={tmp_path}/v", **given)
    assert report.ok and [one.holds for one in report.compared] == [True], report


def test_the_result_of_a_model_whose_words_are_tied_has_the_adapters_alone(tmp_path):
    chain = gpt2(size="tiny", n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=16)
    tokens = torch.arange(32 * 8).view(32, 8) % 16
    words = ["logger=none", "device=cpu", "train.global_batch_size=8", "model.lora.rank=2", "train.eval_every=null"]
    words += ["train.epochs=null", "train.steps=1", f"hydra.run.dir={tmp_path}"]
    weights = train(*words, model=chain, data=TensorData(tokens, tokens, vocab_size=16)).state_dict()
    assert len(weights) == 2 * 4 and all(".lora_" in name for name in weights)


LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
EXPERTS = {  # whose modules beside the experts have the names of the experts' own
    "deepseek_v2": {**LATENT, **ROUTED, "head_dim": 8},
    "deepseek_v3": {**LATENT, **ROUTED},
    "glm4_moe": {**ROUTED, "head_dim": 8},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "head_dim": 8,
        "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "afmoe": {
        "num_experts": 4, "num_local_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 8,
        "n_group": 1, "topk_group": 1,
    },
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPERTS)
def test_peft_reads_all_adapters_of_models_with_experts(tmp_path, kind):
    peft = pytest.importorskip("peft", reason="peft is a test dependency (requirements-dev.txt)")
    transformers = load_transformers()
    sizes = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
    }  # fmt: skip
    made = transformers.AutoConfig.for_model(kind, **sizes | EXPERTS[kind])
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path / "base")
    words = ["model=transformers", f"model.init_from='{tmp_path}/base'", "model.tokenizer=null", "model.lora.rank=2"]
    cfg = config(*words, "model.lora.alpha=6", "model.lora.dropout=0.1", "data=stdlib")
    chain = build_chain(cfg.model, 50)
    adapters = {
        name: 0.3 * torch.randn(parameter.shape)
        for name, parameter in chain.skeleton().named_parameters()
        if ".lora_" in name
    }
    strategy = SimpleNamespace(chain=chain, state_dict=lambda: adapters)
    (tmp_path / "adapters").mkdir()
    write_adapters(tmp_path / "adapters", cfg.model, SimpleNamespace(vocabulary=None), strategy)
    base, merged = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval() for _ in range(2))
    tokens = TOKENS % 50
    with torch.no_grad():
        before = base(tokens).logits
        for name in [name for name in adapters if name.endswith("lora_A.weight")]:
            module = name.removesuffix(".lora_A.weight")
            weight = merged.get_parameter(chain.hugging_face.their_name(f"{module}.weight"))
            weight += 3 * adapters[f"{module}.lora_B.weight"] @ adapters[name]
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").eval()(tokens).logits
        wanted = merged(tokens).logits
    assert (wanted - before).abs().max() > 0.01 and (adapted - wanted).abs().max() < 1e-5
