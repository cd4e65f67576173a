"""The config.json of published models, as they are: each is read with its official sizes, or refused with the reason.

Facts only: names, paths and versions that say nothing of a model are left out.
"""

import json

import pytest

from common.errors import ModelError
from common.packages import load_transformers
from models.gpt2 import gpt2
from models.gpt2_sizes import GPT2
from models.gpt2_sizes import SIZES as GPT2_SIZES
from models.huggingface import WORDS
from models.llama import llama
from models.llama_sizes import LLAMA, LLAMA3, SIZES, Size

SMOL = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.02, "intermediate_size": 1536,
    "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49152,
}  # fmt: skip
SMOL_360M = {
    "hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15, "num_hidden_layers": 32,
    "num_key_value_heads": 5,
}  # fmt: skip
SMOL2 = {
    **SMOL, "is_llama_config": True, "max_position_embeddings": 8192, "rope_interleaved": False, "rope_theta": 100000,
}  # fmt: skip
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN25_1500M = {
    **QWEN25, "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 131072,
    "max_window_layers": 28, "num_attention_heads": 12, "num_hidden_layers": 28, "sliding_window": 131072,
}  # fmt: skip
DISTILLED = {"rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False, "max_window_layers": 21}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_8B = {
    **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32,
    "num_hidden_layers": 36, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "float16", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA3_8B = {
    **LLAMA2_7B, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": 128001,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "num_key_value_heads": 8, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
LLAMA31_8B = {
    **LLAMA3_8B, "max_position_embeddings": 131072, "mlp_bias": False,
    "rope_scaling": {**LLAMA3, "factor": 8.0, "rope_type": "llama3"},
}  # fmt: skip
LLAMA32_1B = {
    **LLAMA31_8B, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA3, "factor": 32.0, "rope_type": "llama3"}, "tie_word_embeddings": True,
}  # fmt: skip
TINYLLAMA = {
    **LLAMA2_7B, "attention_bias": False, "hidden_size": 2048, "intermediate_size": 5632,
    "max_position_embeddings": 2048, "num_hidden_layers": 22, "num_key_value_heads": 4, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
# What it holds, and the number of parameters, a tied head counted once, that its page or its paper says. Of models with
# the same keys it is one.
PUBLISHED = {
    "SmolLM-135M": (SMOL, 134_515_008),
    "SmolLM-360M": ({**SMOL, **SMOL_360M, "mlp_bias": False}, 361_821_120),
    "SmolLM2-135M": ({**SMOL2, "initializer_range": 0.041666666666666664}, 134_515_008),
    "SmolLM2-360M": ({**SMOL2, **SMOL_360M}, 361_821_120),
    "Qwen2.5-0.5B": (QWEN25, 494_032_768),
    "Qwen2.5-1.5B": (QWEN25_1500M, 1_543_714_304),
    "DeepSeek-R1-Distill-Qwen-1.5B": ({**QWEN25_1500M, **DISTILLED}, 1_777_088_000),
    "Qwen3-0.6B": (QWEN3, 596_049_920),
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360),
    "Llama-2-7b-hf": (LLAMA2_7B, 6_738_415_616),
    "Meta-Llama-3-8B": (LLAMA3_8B, 8_030_261_248),
    "Llama-3.1-8B": (LLAMA31_8B, 8_030_261_248),
    "Llama-3.2-1B": (LLAMA32_1B, 1_235_814_400),
    "TinyLlama-1.1B-Chat-v1.0": (TINYLLAMA, 1_100_048_384),
}  # fmt: skip
NAMED = {  # the words of model.size=
    "SmolLM2-135M": "135M", "SmolLM2-360M": "360M", "Qwen2.5-0.5B": "qwen2.5-0.5B", "Qwen3-0.6B": "qwen3-0.6B",
    "Llama-3.2-1B": "llama3.2-1B", "TinyLlama-1.1B-Chat-v1.0": "tinyllama-1.1B",
}  # fmt: skip
GPT2_SMALL = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
}  # fmt: skip
OF_ANY_MODEL = {  # what transformers before 4.25 wrote of generation, and what it writes of training and tokenizers
    "do_sample": True, "early_stopping": False, "finetuning_task": None, "is_decoder": False, "max_length": 300,
    "min_length": 0, "num_beams": 1, "prefix": "a", "repetition_penalty": 1.2, "temperature": 0.7, "top_k": 50,
    "top_p": 0.9, "tokenizer_class": "BertTokenizer", "torchscript": False, "use_bfloat16": False,
}  # fmt: skip
GPT2_MEDIUM = {"n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0, "predict_special_tokens": True}
PUBLISHED_GPT2 = {
    "124M": (GPT2_SMALL, 124_439_808),
    "350M": ({**GPT2_SMALL, **GPT2_MEDIUM}, 354_823_168),
    "774M": ({**GPT2_SMALL, "n_embd": 1280, "n_head": 20, "n_layer": 36}, 774_030_080),
    "1558M": ({**GPT2_SMALL, "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True}, 1_557_611_200),
}


@pytest.fixture
def path(tmp_path):
    """``path(content)``: a config.json that holds it."""

    def write(content):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return tmp_path / "config.json"

    return write


def parameters(chain):
    return sum(parameter.numel() for parameter in chain.skeleton().parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_of_the_llama_family_is_read_with_its_sizes(path, name):
    content, count = PUBLISHED[name]
    sizes = LLAMA.read(path(content))
    chain = llama(size=None, **sizes)
    assert parameters(chain) == count
    assert chain.hugging_face.difference(path(content)) is None
    assert sizes["rope_theta"] == content.get("rope_theta", 10000) and sizes["norm_eps"] == content["rms_norm_eps"]
    assert name not in NAMED or Size(**sizes) == SIZES[NAMED[name]], "model.size= has the published ones"


STRETCHED = {"rope_type": "llama3", **LLAMA3}
ROTATIONS = {
    "both keys": {"rope_parameters": {"rope_theta": 5e5, **STRETCHED}, "rope_scaling": STRETCHED},
    "both keys and a base": {
        "rope_parameters": {"rope_theta": 5e5, **STRETCHED}, "rope_scaling": {**STRETCHED, "factor": 8.0},
        "rope_theta": 4e5,
    },
    "an older key that says nothing": {
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_scaling": {},
    },
    "an older key with a base": {"rope_scaling": {"rope_theta": 5e5, **STRETCHED}, "rope_theta": 4e5},
    "an older key that stretches nothing": {
        "rope_parameters": {"rope_theta": 5e5, **STRETCHED}, "rope_scaling": {"rope_type": "default"},
    },
    "the older name of a type": {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 4e5},
    "two types": {"rope_scaling": {"type": "llama3", **LLAMA3, "rope_type": "default"}, "rope_theta": 4e5},
}  # fmt: skip


@pytest.mark.parametrize("keys", ROTATIONS.values(), ids=ROTATIONS)
def test_rotations_that_two_keys_describe_are_those_of_transformers(path, keys):
    transformers = pytest.importorskip("transformers", reason="a test dependency (requirements-dev.txt)")
    load_transformers()
    content = {key: value for key, value in LLAMA31_8B.items() if key not in ("rope_scaling", "rope_theta")}
    file = path({**content, "model_type": "llama", **keys})
    theirs, ours = transformers.AutoConfig.from_pretrained(file.parent).rope_parameters, LLAMA.read(file)
    assert ours["rope_theta"] == theirs["rope_theta"]
    stretched = {key: theirs[key] for key in LLAMA3} if theirs["rope_type"] == "llama3" else None
    assert ours["rope_scaling"] == stretched


@pytest.mark.parametrize("size, published", PUBLISHED_GPT2.items(), ids=PUBLISHED_GPT2)
def test_a_published_gpt2_is_the_size_of_its_name(path, size, published):
    content, count = published
    assert GPT2.read(path(content)) == {**vars(GPT2_SIZES[size]), "vocab_size": 50257}
    chain = gpt2(size=size, vocab_size=50257)
    assert parameters(chain) == count and chain.hugging_face.difference(path(content)) is None


def test_how_a_model_generates_and_what_its_tokenizer_is_changes_no_number_of_it(path):
    assert GPT2.read(path({**GPT2_SMALL, **OF_ANY_MODEL})) == GPT2.read(path(GPT2_SMALL))
    assert LLAMA.read(path({**SMOL, **OF_ANY_MODEL})) == LLAMA.read(path(SMOL))


CHANGED = {
    "GPT-2": (GPT2, GPT2_SMALL, [
        ({"activation_function": "gelu"}, "has activation_function=gelu .here gelu_new or gelu_pytorch_tanh"),
        ({"scale_attn_weights": False}, "has scale_attn_weights=False .here True"),
        ({"scale_attn_by_inverse_layer_idx": True}, "has scale_attn_by_inverse_layer_idx=True, which is not known"),
        ({"layer_norm_epsilon": 1e-3}, "has layer_norm_epsilon=0.001 .here 1e-05"),
        ({"tie_word_embeddings": False}, "has tie_word_embeddings=False .here True"),
        ({"n_inner": 64}, "has n_inner=64 .here 4 n_embd"),
        ({"add_cross_attention": True}, "has add_cross_attention=True"),
        ({"rotary": True}, "has rotary=True, which is not known here"),
        ({"architectures": ["BloomForCausalLM"]}, "is BloomForCausalLM; use model=transformers$"),
        ({"architectures": []}, 'names no architecture; write "architectures": ."GPT2LMHeadModel". into it'),
        (SMOL, "is LlamaForCausalLM; use model=llama$"),
    ]),
    "Llama": (LLAMA, SMOL, [
        ({"mlp_bias": True}, "has mlp_bias=True, .* numbers .* Use model=transformers$"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu .here silu"),
        ({"sliding_window": 4096}, "sliding_window=4096 .here none"),  # of a kind that has no switch for it
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"intermediate_size": None}, "lacks intermediate_size"),
        *(({"num_attention_heads": heads}, "json describes none of LlamaForCausalLM") for heads in (0, "9", [9])),
        ({"architectures": ["MistralForCausalLM"]}, "is MistralForCausalLM; use model=transformers$"),
        ({"architectures": None}, 'write "architectures": ."LlamaForCausalLM". .*model=transformers$'),
        ({"architectures": "Llama"}, "names no architecture"),
        (GPT2_SMALL, "is GPT2LMHeadModel; use model=gpt2$"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_what_would_change_numbers_is_an_error_that_names_it_and_the_word_to_type(path, name):
    family, content, changes = CHANGED[name]
    for changed, says in changes:
        with pytest.raises(ModelError, match=says):
            family.read(path({**content, **changed}))


@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=lambda family: family.name)
def test_the_word_to_type_is_that_of_the_family(family):
    assert {kind for kind, word in WORDS.items() if word == family.name} == family.kinds.keys()
