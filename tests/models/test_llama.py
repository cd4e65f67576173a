"""The Llama family beside transformers' Llama, Qwen2 and Qwen3, which hold the same random weights."""

import json
from dataclasses import replace

import pytest
import torch

from models.generate import Draws, generate
from models.llama import llama
from models.llama_sizes import KEYS, LLAMA, SIZES, Size, chosen_size, sizes_of, to_config
from tests.models.random_models import POSITIONS, WORDS, assert_same, random_model, with_weights_of

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
QWEN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
PUBLISHED = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama, heads of their own width": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "llama 3": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen2": ("qwen2", QWEN),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, **QWEN}),
    "qwen3": ("qwen3", {"head_dim": 32, **QWEN}),
    "qwen3, tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


def as_ours(model, folder):
    """The same model as a chain's layers, by its config.json."""
    model.save_pretrained(folder)
    chain = llama(**LLAMA.read(folder / "config.json"))
    return chain, with_weights_of(chain, model)


@pytest.mark.parametrize("kind, options", PUBLISHED.values(), ids=PUBLISHED)
def test_logits_gradients_and_greedy_text_are_those_of_transformers(tmp_path, kind, options):
    reference = random_model(kind, **options)
    chain, layers = as_ours(reference, tmp_path)
    assert_same(chain, layers, reference)
    prompts, count = [[3, 1, 4, 1, 5], [9, 2]], 12
    drawn = generate(
        layers, prompts, count, Draws(temperature=0), positions=POSITIONS, vocab_size=WORDS, device=CPU, cached=True
    )
    for prompt, text in zip(prompts, drawn, strict=True):
        given = torch.tensor([prompt])
        more = reference.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False)
        assert text == more[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind, options", PUBLISHED.values(), ids=PUBLISHED)
def test_the_rotations_that_older_files_hold_must_be_those_of_the_config_json(tmp_path, kind, options):
    reference = random_model(kind, **options)
    chain, _ = as_ours(reference, tmp_path)
    (follows,), given = chain.hugging_face.redundant.values(), reference.model.rotary_emb.inv_freq
    assert all(follows(given.to(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert not follows(given**1.1) and not follows(given[:-1])


@pytest.mark.parametrize("kind, options", PUBLISHED.values(), ids=PUBLISHED)
def test_config_json_is_read_and_written_without_a_difference(tmp_path, kind, options):
    model = random_model(kind, **options)
    model.save_pretrained(tmp_path)
    config = model.config
    written = to_config(Size(**LLAMA.read(tmp_path / "config.json")))
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "config.json").write_text(json.dumps(written))
    from transformers import AutoConfig

    again = AutoConfig.from_pretrained(tmp_path / "again")
    assert type(again) is type(config)
    for theirs in {*KEYS.values(), "rope_parameters"} & config.to_dict().keys():
        assert getattr(again, theirs) == getattr(config, theirs), theirs


def test_a_size_s_own_rotations_do_not_stay_beside_a_folder_that_has_none(tmp_path):
    own = SIZES["llama3.2-1B"]
    (tmp_path / "config.json").write_text(json.dumps(to_config(replace(own, rope_scaling=None))))
    section = {"size": None, "init_from": str(tmp_path)}
    assert chosen_size(None, sizes_of(section)) == replace(own, rope_scaling=None)
    assert "says rope_scaling=None" in llama(size="llama3.2-1B").hugging_face.difference(tmp_path / "config.json")


@pytest.mark.filterwarnings("error")
def test_under_bf16_norms_and_rotations_are_computed_in_float32():
    sizes = dict(n_layer=1, n_head=2, kv_heads=1, head_dim=32, n_embd=32, mlp_width=32, vocab_size=50, qk_norm=True)
    chain = llama(**sizes)
    layers = chain.build(chain.names, 1, CPU)
    tokens = torch.randint(0, 50, (1, 1000), generator=torch.Generator().manual_seed(1))
    exact = layers(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layers(tokens)
        assert layers["layers.0"].self_attn.q_norm(torch.ones(32, dtype=torch.bfloat16)).dtype == torch.float32
    assert (rounded.float() - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(
    "sizes, says",
    [
        ({"kv_heads": 3}, "model.kv_heads=3 does not divide model.n_head=4"),
        ({"head_dim": 7}, "model.head_dim=7 must be even"),
        ({"rope_scaling": {"factor": 2.0}}, "model.rope_scaling=.* must have factor, low_freq_factor"),
    ],
)
def test_sizes_that_do_not_fit_are_an_error(sizes, says):
    with pytest.raises(ValueError, match=says):
        llama(**sizes)


def test_bias_and_norm_together_are_a_model_without_a_form_at_hugging_face():
    assert llama(qkv_bias=True, qk_norm=True).hugging_face is None
