"""Any causal language model of transformers as a chain: the model's own numbers, layer by layer, or a refusal."""

import json
import resource
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from benchmarks import architectures
from common.errors import ModelError, TrainingError
from common.packages import load_transformers
from data.dataset import Batch
from models.attention import Reordered
from models.causal_lm import causal_lm
from models.causal_lm_balance import Balance
from models.causal_lm_config import read_config
from models.cut import GatherInput, Vocabulary, check_table
from models.sequence import computing_part
from parallel.examination import examine
from tests.models.random_models import SIZES, WORDS, assert_same, random_model, with_weights_of
from training.checkpoint.init_from import Weights
from training.export.served import ServedModel, TensorInfo, write_program
from training.run.checks.model import check_proof

pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
CPU = torch.device("cpu")
KINDS = {kind: options for kind, options in architectures.KINDS.items() if kind not in architectures.REFUSED}
KINDS |= {
    "qwen3": {"head_dim": 32},
    # Windows in some layers; with gemma2, in every second one, beside capped scores and logits.
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "gptj": {"rotary_dim": 8},  # its projection has a bias
    "apertus": {},  # its activation has parameters
    "bert": {"is_decoder": True},  # its projection is a part of a module
    "granite_swa": {},  # rotary positions of several kinds
    "nanochat": {},  # one norm before the layers and after them
    "llama4_text": {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 64},  # names no base model
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
}
REFUSED = {
    "bloom": ({}, "BloomForCausalLM cannot be cut into layers: it does not compute a text without looking at numbers"),
    "inkling2_text": ({}, "cannot be cut into layers"),
    "bert": ({}, "BertLMHeadModel is no causal language model with this configuration: what comes later changes"),
    "biogpt": ({"layerdrop": 0.1}, r"leaves out layers at random \(layerdrop=0.1\).* set \+model.settings.layerdrop=0"),
    "ctrl": ({}, "cannot be cut into layers: its own code does not run without the layers"),
    "blt": ({}, "cannot be cut into layers: its own code does not run without the layers"),
    "t5": ({}, "describes a t5 model, which is no causal language model"),
    "gemma3": ({}, "describes a gemma3 model with vision_config; model=transformers trains text only"),
}


WHOLE_SEQUENCES = {
    "falcon": "layers.0 returns different values for positions in another order .*, so it attends by itself",
    "mpt": "layers.0 returns different values for positions in another order .*, so it attends by itself",
    "gpt_oss": r"GptOssAttention has attention with sinks; it needs whole sequences, parallel.cp=1",
    "granite_swa": r"GraniteSWAAttention has attention with sinks; it needs whole sequences, parallel.cp=1",
}


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_sequences_are_computed_or_refused(tmp_path, kind):
    random_model(kind, **KINDS[kind]).config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    if kind in WHOLE_SEQUENCES:
        with pytest.raises(ModelError, match=WHOLE_SEQUENCES[kind]):
            chain.prove_parts()
    else:
        chain.prove_parts()


PARTS = {
    "gemma2": {"sliding_window": 8},
    "deepseek_v3": {
        **dict.fromkeys(("qk_rope_head_dim", "head_dim", "qk_nope_head_dim"), 8), "v_head_dim": 12, "q_lora_rank": 16,
        "kv_lora_rank": 16, "n_group": 2, "topk_group": 1, "n_routed_experts": 4, "num_key_value_heads": 4,
    },
    "gpt2": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", PARTS)
def test_gradients_are_those_of_the_whole_when_positions_come_in_another_order(tmp_path, kind):
    reference = random_model(kind, **PARTS[kind])
    reference.config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    layers = with_weights_of(chain, reference)
    tokens, order = torch.randint(3, WORDS, (2, 20)), torch.randperm(20)
    wanted = reference(tokens, use_cache=False).logits
    wanted.square().mean().backward()
    with computing_part(Reordered(order)):
        logits = layers(tokens[:, order])
        torch.testing.assert_close(logits, wanted[:, order], rtol=1e-4, atol=1e-5)
        logits.square().mean().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in layers.named_parameters():
        gradient = theirs[chain.hugging_face.their_name(name)].grad
        if gradient is not None:
            assert (parameter.grad - gradient).norm() <= 2e-5 * gradient.norm(), name


@pytest.mark.parametrize(
    "kind, options, says",
    [
        ("llama", {"attention_dropout": 0.1}, r"dropout of its own \(\+model.settings.attention_dropout=0"),
        ("llama4_text", {**KINDS["llama4_text"], "attention_chunk_size": 3}, "a mask that is no causal one or window"),
    ],
)
def test_attention_that_needs_whole_sequences_is_named_when_it_is_computed(tmp_path, kind, options, says):
    random_model(kind, **options).config.save_pretrained(tmp_path)
    layer = causal_lm(str(tmp_path)).build(["layers.0"], 3, CPU).train()
    with computing_part(Reordered(torch.arange(4))), pytest.raises(ModelError, match=says):
        layer(torch.zeros(1, 4, 64))


class FewOfMany(Reordered):
    """The first positions of long sequences, which attend to nothing."""

    def __init__(self, length: int) -> None:
        super().__init__(torch.arange(8))
        self.length, self.windows = length, []

    def attend(self, *tensors, window=None, **_):
        self.windows.append(window)
        return tensors[-1].repeat_interleave(tensors[0].shape[1] // tensors[-1].shape[1], dim=1)


@pytest.mark.parametrize(
    "kind, options, windows",
    [
        ("gemma2", {"sliding_window": 4096}, [4096, None]),
        ("mistral", {"sliding_window": 19_999}, [19_999] * 2),
        ("mistral", {"sliding_window": 20_000}, [None] * 2),
        ("llama4_text", {**KINDS["llama4_text"], "attention_chunk_size": 9_999}, "a mask that is no causal one"),
    ],
)
def test_masks_of_long_texts_are_known_without_their_memory(tmp_path, kind, options, windows):
    random_model(kind, **options).config.save_pretrained(tmp_path)
    layers = causal_lm(str(tmp_path)).build(["layers.0", "layers.1"], 3, CPU)
    before, part, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, FewOfMany(20_000), windows[0] == "a"
    with computing_part(part), pytest.raises(ModelError, match=windows) if refused else nullcontext():
        layers(torch.zeros(1, 8, 64))
    assert refused or part.windows == windows
    mask = 20_000**2 / 2**10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < mask, "KiB, and a mask alone has as many"


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_the_whole_model(tmp_path, kind):
    reference = random_model(kind, **KINDS[kind])
    reference.config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    chain.skeleton()  # first, as a plan does
    chain.prove()
    assert len(chain.names) == len(["embedding", "head"]) + 3
    assert_same(chain, with_weights_of(chain, reference), reference)


def test_experts_do_not_copy_their_weights_for_each_token(tmp_path, monkeypatch):
    """As a batched product does, which took 77 times as long for experts of 256 x 512."""
    reference = random_model("mixtral", **KINDS["mixtral"])
    reference.config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    layers = with_weights_of(chain, reference)
    copied = "transformers.integrations.moe.batched_mm_experts_forward"
    monkeypatch.setattr(copied, lambda *_: pytest.fail("the weights were copied"))
    assert_same(chain, layers, reference)


def test_a_loss_of_routers_must_be_the_library_s(tmp_path, monkeypatch):
    random_model("mixtral", output_router_logits=True).config.save_pretrained(tmp_path)
    causal_lm(str(tmp_path)).prove()
    chain = causal_lm(str(tmp_path))
    monkeypatch.setattr(Balance, "_loss", lambda self, totals, own=Balance._loss: 1.1 * own(self, totals))
    with pytest.raises(ModelError, match="MixtralForCausalLM adds something to the loss of its logits"):
        chain.prove()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_by_what_it_is(tmp_path, kind):
    options, message = REFUSED[kind]
    known = load_transformers().AutoConfig.for_model(kind)
    sizes = {key: value for key, value in {**SIZES, **options}.items() if hasattr(known, key)}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, "is_decoder": False}))
    with pytest.raises(ModelError, match=message):
        causal_lm(str(tmp_path)).prove()


@pytest.fixture
def gemma(tmp_path):
    random_model("gemma2", **KINDS["gemma2"]).config.save_pretrained(tmp_path)
    return tmp_path


def test_stages_that_are_built_apart_have_the_weights_of_the_whole(gemma):
    chain = causal_lm(str(gemma))
    whole = chain.build(chain.names, 7, CPU).state_dict()
    for name in chain.names:
        for key, tensor in chain.build([name], 7, CPU).state_dict().items():
            assert torch.equal(tensor, whole[key]), key
    assert torch.equal(whole["head.lm_head.weight"], whole["embedding.model.embed_tokens.weight"])


def test_initial_weights_are_drawn_as_the_model_draws_them(tmp_path):
    """GPT-2 draws the projections that end in the residual stream narrower, from the module around them."""
    load_transformers().GPT2Config(n_embd=256, n_layer=8, n_head=4).save_pretrained(tmp_path)
    layers = causal_lm(str(tmp_path)).build(["layers.0"], 3, CPU).state_dict()
    assert layers["layers.0.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert layers["layers.0.attn.c_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert not layers["layers.0.attn.c_proj.bias"].any() and (layers["layers.0.ln_1.weight"] == 1).all()


def test_what_only_constructors_set_is_as_they_set_it(tmp_path):
    reference = random_model("apertus")
    constructed = type(reference)(reference.config).state_dict()
    reference.config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    activation = {name: t for name, t in chain.build(["layers.1"], 3, CPU).state_dict().items() if ".act_fn." in name}
    assert len(activation) == 4
    for name, tensor in activation.items():
        assert torch.equal(tensor, constructed[chain.hugging_face.their_name(name)]), name


def test_dropout_between_the_modules_of_a_model_is_drawn_in_training(tmp_path):
    random_model("biogpt", hidden_dropout_prob=0.5).config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    embedding = chain.build(["embedding"], 3, CPU)
    tokens = torch.arange(3, 35)[None]
    assert 0.4 < (embedding.train()(tokens) == 0).float().mean() < 0.6
    assert (embedding.eval()(tokens) == 0).float().mean() < 0.1
    assert examine(chain, Batch(tokens, tokens)).which("draws")[0] == "embedding"


def test_the_projection_s_bias_grows_and_is_cut_with_the_vocabulary(tmp_path):
    model = random_model("gptj", rotary_dim=8)
    model.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path), vocab_size=WORDS + 6)
    weights = Weights(OmegaConf.create({"init_from": str(tmp_path), "name": "transformers"}), chain)
    bias, own = weights["head.lm_head.bias"], model.lm_head.bias
    torch.testing.assert_close(bias[...], torch.cat([own, own.mean().expand(6)]).detach())
    tensors, config = chain.hugging_face.export(chain.build(chain.names, 3, CPU).state_dict(), WORDS + 2)
    assert len(tensors["lm_head.bias"]) == len(tensors["lm_head.weight"]) == config["vocab_size"] == WORDS + 2


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 5e5}


@pytest.mark.parametrize(
    "kind, rope, older",
    [
        ("mistral", {"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1e6}),
        ("mistral", LLAMA3, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        ("gemma3_text", None, {}),  # has a base for each kind of layers
    ],
)
def test_an_export_has_older_keys_of_positions_which_change_nothing_in_transformers(tmp_path, kind, rope, older):
    config = random_model(kind, **(KINDS[kind] if rope is None else {"rope_parameters": rope})).config
    config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    _, exported = chain.hugging_face.export(chain.build(chain.names, 3, CPU).state_dict(), None)
    assert {key: exported[key] for key in ("rope_theta", "rope_scaling") if key in exported} == older
    (tmp_path / "config.json").write_text(json.dumps(exported))
    again = load_transformers().AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == config.rope_parameters == exported["rope_parameters"]
    assert chain.hugging_face.difference(tmp_path / "config.json") is None


def test_infinity_in_a_file_is_a_number(tmp_path):
    config = load_transformers().BambaConfig(time_step_limit=(0.0, float("inf")))
    config.save_pretrained(tmp_path)
    assert read_config(str(tmp_path), None, {}).time_step_limit[1] == float("inf")


def test_settings_that_are_typed_are_no_difference_to_the_file_of_the_weights(gemma):
    chain = causal_lm(str(gemma), settings={"attention_dropout": 0.5, "sliding_window": 4})
    assert chain.hugging_face.difference(gemma / "config.json") is None
    changed = json.loads((gemma / "config.json").read_text()) | {"query_pre_attn_scalar": 8}
    (gemma / "other.json").write_text(json.dumps(changed))
    assert "says query_pre_attn_scalar=8" in chain.hugging_face.difference(gemma / "other.json")


@pytest.mark.parametrize(
    "key, value, said", [("eos_token_id", 9, None), ("pad_token_id", None, None), ("pad_token_id", 9, "pad_token_id=9")]
)
def test_tokens_that_an_export_takes_from_the_data_are_no_difference(gemma, tmp_path, key, value, said):
    config = json.loads((gemma / "config.json").read_text()) | {"pad_token_id": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    exported = tmp_path / "exported.json"
    exported.write_text(json.dumps(config | {key: value}))
    found = causal_lm(str(tmp_path / "config.json")).hugging_face.difference(exported)
    assert found is None if said is None else said in found


def test_settings_replace_keys_of_the_file_and_an_unknown_one_is_named(gemma):
    chain = causal_lm(str(gemma / "config.json"), vocab_size=300, settings={"num_hidden_layers": 2})
    assert chain.names == ["embedding", "layers.0", "layers.1", "head"]
    assert chain.limits == {"vocabulary": 300, "positions": 64}
    assert causal_lm(str(gemma)).limits["vocabulary"] == WORDS
    with pytest.raises(ModelError, match=r"model.settings.heads: config.json of a gemma2 model has no such key"):
        causal_lm(str(gemma), settings={"heads": 2})
    with pytest.raises(ModelError, match=r"model.settings.vocab_size: type model.vocab_size=300"):
        causal_lm(str(gemma), settings={"vocab_size": 300})


def test_a_file_without_a_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config.json describes no model that transformers [\d.]+ has: 'model_type'"):
        causal_lm(str(tmp_path))
    with pytest.raises(ModelError, match=r"set model.init_from= a folder .* or model.config="):
        causal_lm(None)


@pytest.mark.parametrize(
    "kind, options, wanted",
    [
        ("qwen3", {"head_dim": 32}, {"layers.*.self_attn.q_proj": 4, "layers.*.self_attn.k_proj": 2}),
        ("gpt_neox", {}, {"layers.*.attention.query_key_value": 4}),  # side by side within each head
        ("codegen", {"n_head": 8, "rotary_dim": 4}, {"layers.*.attn.qkv_proj": 4}),  # within each of four parts
    ],
)
def test_the_tensor_plan_becomes_a_table_of_cuts(tmp_path, kind, options, wanted):
    random_model(kind, **options).config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    check_table(chain.cut, chain.skeleton(), chain.tied)
    heads = {name: chain.cut[name].heads(chain.skeleton().get_submodule(name.replace("*", "0"))) for name in wanted}
    assert heads == wanted
    assert isinstance(chain.cut[next(iter(wanted)).rpartition(".")[0]], GatherInput)


def test_both_copies_of_a_tied_weight_are_cut_or_none(tmp_path):
    random_model("cohere", tie_word_embeddings=True).config.save_pretrained(tmp_path)  # its logits are scaled
    chain = causal_lm(str(tmp_path))
    assert chain.tied and not any(isinstance(cut, Vocabulary) for cut in chain.cut.values())


@pytest.mark.parametrize(
    "kind, options, says",
    [
        ("phi3", {}, r"qkv_proj cannot be cut: Phi3ForCausalLM has the style 'colwise_gather_out"),
        ("cohere", {"use_qk_norm": True}, r"self_attn cannot be cut: CohereForCausalLM has parameters for each head"),
    ],
)
def test_what_the_tensor_plan_does_not_say_is_named(tmp_path, kind, options, says):
    random_model(kind, **options).config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    with pytest.raises(ModelError, match=says):
        check_table(chain.cut, chain.skeleton(), chain.tied)


def test_a_program_for_all_lengths_is_refused_with_what_to_export_instead(gemma, tmp_path):
    chain = causal_lm(str(gemma))
    tokens, logits = TensorInfo("tokens", torch.int64, (-1,)), TensorInfo("logits", torch.float32, (-1, WORDS))
    whole = torch.nn.Sequential(chain.build(chain.names, 3, CPU).eval())
    model = ServedModel("gemma", whole, (tokens,), logits, positions=64)
    with pytest.raises(TrainingError, match="Gemma2ForCausalLM get masks and positions .* export.format=safetensors"):
        write_program(tmp_path / "model.pt2", model)


def test_a_model_is_proved_when_it_is_first_seen_and_again_if_it_or_what_computes_it_is_another(gemma, monkeypatch):
    proved, data = [], SimpleNamespace(cache_dir=str(gemma / "cache"))
    chain, other = causal_lm(str(gemma)), causal_lm(str(gemma), settings={"sliding_window": 4})

    def check(chain, right=True):
        def prove():
            proved.append(chain)
            if not right:
                raise ModelError("no")

        before = len(proved)
        check_proof(None, replace(chain, prove=prove), data)
        return len(proved) > before

    assert [check(chain), check(chain), check(other), check(other), check(chain)] == [True, False, True, False, False]
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert [check(chain), check(chain)] == [True, False]
    monkeypatch.setattr("transformers.configuration_utils.__version__", "6.0")
    newer = causal_lm(str(gemma))
    assert [check(newer), check(newer)] == [True, False]
    monkeypatch.setattr("training.run.checks.model._MODELS", gemma)
    for _ in range(2):
        with pytest.raises(ModelError):
            check(newer, right=False)
    data.cache_dir = str(gemma / "config.json")
    assert check(newer) and check(newer), "where the cache cannot be written"
