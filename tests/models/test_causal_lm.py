"""Any causal language model of transformers as a chain: the model's own numbers, layer by layer, or a refusal."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import architectures
from common.errors import ModelError
from common.packages import load_transformers
from models.causal_lm import causal_lm
from models.cut import Region, Vocabulary, check_table
from tests.models.random_models import SIZES, WORDS, assert_same, random_model, with_weights_of

pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
CPU = torch.device("cpu")
KINDS = {kind: options for kind, options in architectures.KINDS.items() if kind not in architectures.REFUSED}
KINDS |= {
    "qwen3": {"head_dim": 32},
    # Windows in some layers; with gemma2, in every second one, beside capped scores and logits.
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "mpt": {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 64},
}
REFUSED = {
    "bloom": ({}, "BloomForCausalLM cannot be cut into layers: it does not compute a text without looking at numbers"),
    "inkling2_text": ({}, "cannot be cut into layers"),
    "t5": ({}, "describes a t5 model, which is no causal language model"),
    "gemma3": ({}, "describes a gemma3 model with vision_config; model=transformers trains text only"),
    "mixtral": ({"output_router_logits": True}, "adds a router's loss over the whole batch"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_the_whole_model(tmp_path, kind):
    reference = random_model(kind, **KINDS[kind])
    reference.config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    chain.skeleton()  # first, as a plan does
    chain.prove()
    assert len(chain.names) == len(["embedding", "head"]) + 3
    assert_same(chain, with_weights_of(chain, reference), reference)


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


def test_settings_replace_keys_of_the_file_and_an_unknown_one_is_named(gemma):
    chain = causal_lm(str(gemma / "config.json"), vocab_size=300, settings={"num_hidden_layers": 2})
    assert chain.names == ["embedding", "layers.0", "layers.1", "head"]
    assert chain.limits == {"vocabulary": 300, "positions": 64}
    with pytest.raises(ModelError, match=r"model.settings.heads: config.json of a gemma2 model has no such key"):
        causal_lm(str(gemma), settings={"heads": 2})


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
    ],
)
def test_the_tensor_plan_becomes_a_table_of_cuts(tmp_path, kind, options, wanted):
    random_model(kind, **options).config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    check_table(chain.cut, chain.skeleton())
    heads = {name: chain.cut[name].heads(chain.skeleton().get_submodule(name.replace("*", "0"))) for name in wanted}
    assert heads == wanted
    assert isinstance(chain.cut[next(iter(wanted)).rpartition(".")[0]], Region)


def test_both_copies_of_a_tied_weight_are_cut_or_none(tmp_path):
    random_model("cohere", tie_word_embeddings=True).config.save_pretrained(tmp_path)  # its logits are scaled
    chain = causal_lm(str(tmp_path))
    assert chain.tied and not any(isinstance(cut, Vocabulary) for cut in chain.cut.values())


def test_a_style_of_the_tensor_plan_that_is_not_known_is_named(tmp_path):
    random_model("phi3").config.save_pretrained(tmp_path)
    chain = causal_lm(str(tmp_path))
    with pytest.raises(ModelError, match=r"qkv_proj cannot be cut: Phi3ForCausalLM has the style 'colwise_gather_out"):
        check_table(chain.cut, chain.skeleton())


def test_words_are_counted(gemma):
    assert causal_lm(str(gemma)).limits["vocabulary"] == WORDS
