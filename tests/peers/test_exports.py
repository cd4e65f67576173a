"""Exports read by other programs: the log-probabilities of given tokens, and the likeliest tokens, beside a run's own.

The table of docs/peers.md says what each program gives, and is what these tests expect. With LLAMA_CPP=FOLDER, a folder
of llama.cpp's source code, its converter is tried, too.
"""

import argparse
import importlib.util
import os

import pytest
import readers
import torch
from commandline import ROOT
from composed import again, execute, run
from torch import Tensor

from common.packages import load_transformers
from training.run.restore import continued, restore

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, vocab_size=50257)
SIZES |= dict(intermediate_size=96, num_key_value_heads=2, tie_word_embeddings=True, head_dim=16, initializer_range=0.1)
SIZES |= dict(rope_parameters=dict(rope_type="default", rope_theta=5e5), rms_norm_eps=1e-3)  # not the defaults
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SCALED = dict(rope_parameters=dict(LLAMA3, rope_theta=5e5, original_max_position_embeddings=16))
UNTIED = dict(tie_word_embeddings=False)
LORA = ["model.lora.rank=4", "model.lora.targets=null"]
# The kind of a model of Hugging Face's, its config.json, and further words of the run that starts from it.
MODELS = {
    "GPT-2": ("gpt2", GPT2, []),
    "GPT-2, LoRA": ("gpt2", GPT2, LORA),
    "Llama": ("llama", dict(num_key_value_heads=4, initializer_range=0.15), []),
    "Llama, 2 of 4 heads for keys, own output layer": ("llama", UNTIED, []),
    "Llama, 50,261 words, heads of width 8": ("llama", dict(vocab_size=50261, head_dim=8), []),
    "Llama, scaled positions": ("llama", SCALED, []),
    "Llama, LoRA": ("llama", UNTIED, LORA),
    "Qwen2": ("qwen2", {}, []),
    "Qwen3": ("qwen3", {}, []),
    "Mistral": ("mistral", dict(sliding_window=None, **UNTIED), []),
    "Mistral, window of 8": ("mistral", dict(sliding_window=8, **UNTIED), []),
    "OLMo 2": ("olmo2", UNTIED, []),
    "Mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **UNTIED), []),
}
OURS = {"gpt2": "gpt2", "llama": "llama", "qwen2": "llama", "qwen3": "llama"}
HALF, LENGTH = 24, 32  # tokens
# What reads an export: a format, a function, the package that it needs, and whether it computes in bfloat16.
READERS = {
    "transformers": ("safetensors", readers.transformers, "transformers", False),
    "transformers, bf16": ("safetensors", readers.transformers, "transformers", True),
    "peft": ("peft", readers.peft, "peft", False),
    "lm-eval": ("safetensors", readers.lm_eval, "lm_eval", False),
    "onnxruntime": ("onnx", readers.onnxruntime, "onnxruntime", False),
    "llama.cpp": ("safetensors", readers.llama_cpp, "xllamacpp", False),
    "llama.cpp, bf16": ("safetensors", readers.llama_cpp, "xllamacpp", True),
    "mlx-lm": ("safetensors", readers.mlx, "mlx_lm", False),
    "mlx-lm, bf16": ("safetensors", readers.mlx, "mlx_lm", True),
    "CTranslate2": ("safetensors", readers.ctranslate2, "ctranslate2", False),
}
# What a program that fails says.
FAILS = {
    ("Llama, 50,261 words, heads of width 8", "CTranslate2"): "dimension 64 but expected 128",
    ("Mistral, window of 8", "CTranslate2"): "buffer to copy is of size 32 but current storage size is 8",
    ("OLMo 2", "CTranslate2"): "No conversion is registered for the model configuration Olmo2Config",
    ("Mixtral", "CTranslate2"): "No conversion is registered for the model configuration MixtralConfig",
    ("Mixtral", "mlx-lm, bf16"): "only supports float32",
}  # fmt: skip


def table() -> dict[tuple[str, str], str]:
    """The table of docs/peers.md: {(model, program): a limit of differences, or one word, or "—" (no test)}."""
    _, start, rest = (ROOT / "docs" / "peers.md").read_text().partition("| export of |")
    names, _, *rows = (line[2:-2].split(" | ") for line in (start + rest).partition("\n\n")[0].splitlines())
    found = {(row[0], name): cell for row in rows for name, cell in zip(names[1:], row[1:], strict=True)}
    assert set(found) == {(model, name) for model in MODELS for name in READERS}
    return found


def scores(logits: Tensor, tokens: list[int]) -> Tensor:
    """The log-probabilities of ``tokens[HALF:]`` from the logits [tokens, words] of the whole text."""
    after = logits.detach().float().log_softmax(-1)[HALF - 1 : -1]
    return after.gather(1, torch.tensor(tokens[HALF:])[:, None])[:, 0]


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """``export(model, format)``: the folder of an export, some tokens, the logits of the run's own model for them, and
    the tokens that mode=sample continues those before HALF with."""
    made, hub = {}, load_transformers()
    torch.set_num_threads(1)

    def trained(name):
        kind, sizes, more = MODELS[name]
        sizes = sizes if kind == "gpt2" else {**SIZES, **sizes}
        room = tmp_path_factory.mktemp("model")
        torch.manual_seed(1)
        config = hub.AutoConfig.for_model(kind, **sizes, bos_token_id=50256, eos_token_id=50256)
        model = hub.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which begin at 0 or 1
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(room / "base")
        line = [f"model={OURS.get(kind, 'transformers')}", f"model.init_from='{room}/base'", "train.steps=3", *more]
        line += [] if kind == "gpt2" else ["model.tokenizer=null"]
        line += ["data=text", f"data.root='{argparse.__file__}'", f"data.cache_dir='{room}/cache'", "data.seq_len=32"]
        line += ["train.epochs=null", "train.global_batch_size=4", "train.precision=fp32", "train.eval_every=null"]
        run(room / "run", *line, f"optim.lr={'0.01' if more else '1e-4'}", "scheduler=constant")
        asked = again(room / "run", "mode=sample", "sample.temperature=0", f"sample.tokens={readers.COUNT}")
        restored = restore(asked, "cpu")
        tokens = restored.data.vocabulary.tokens(["def parse_known_args(self, args=None, namespace=None): pass # " * 4])
        tokens, layers = tokens[0][:HALF], restored.strategy.stages[0].eval().layers
        drawn = continued(asked, restored, [tokens])[0]
        words = max(sizes.get("vocab_size", 0), 50257)
        with torch.no_grad():
            for _ in range(LENGTH - HALF):
                tokens = [*tokens, int(layers(torch.tensor([tokens]))[0, -1, :50257].topk(4).indices[3])]
            turned = [*reversed(tokens[:HALF]), *tokens[HALF:]]
            logits = layers(torch.tensor([tokens, turned]))[..., :words]
            base = hub.AutoModelForCausalLM.from_pretrained(room / "base")(torch.tensor([tokens])).logits[0]
        own, other, start = (scores(these, tokens) for these in (*logits, base))
        assert len(set(drawn)) > 2
        assert (own - other).abs().max() > 0.5, "the order of tokens makes a difference"
        assert (own - start).abs().max() > 0.001, "training makes a difference"
        return room, tokens, logits[0], drawn

    def get(name, form):
        if name not in made:
            made[name] = trained(name)
        room, *own = made[name]
        if not (room / form).exists():
            execute(again(room / "run", "mode=export", f"export.format={form}", f"export_to='{room}/{form}'"), room)
        return room / form, *own

    return get


CASES = [(model, name) for (model, name), cell in table().items() if cell != "—"]


@pytest.mark.parametrize("model, name", [pytest.param(*c, marks=pytest.mark.xdist_group(c[0])) for c in CASES])
def test_an_export_is_read_as_the_page_says(export, model, name, tmp_path):
    form, read, package, bf16 = READERS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -r requirements-peers.txt")
    if read is readers.llama_cpp and "LLAMA_CPP" not in os.environ:
        pytest.skip("LLAMA_CPP is not set to a folder of llama.cpp's source code, which has the converter")
    said = table()[model, name]
    if said == "refused":
        with pytest.raises(Exception, match="cannot be exported in this format: .*safetensors"):
            export(model, form)
        return
    folder, tokens, own, drawn = export(model, form)
    if said == "fails":
        with pytest.raises(Exception, match=FAILS[model, name]):
            read(folder, tokens, HALF, tmp_path, bf16)
        return
    theirs, continuation = read(folder, tokens, HALF, tmp_path, bf16)
    if theirs.ndim == 2:
        own = own[:, : theirs.shape[1]]  # export.format=onnx has the words of the data only
        theirs = scores(theirs, tokens)
    own = scores(own, tokens)
    own = own.sum() if theirs.ndim == 0 else own
    assert theirs.shape == own.shape
    difference = float((theirs - own).abs().max())
    print(f"{model}, {name}: {difference:.2g}; {continuation} and {drawn}")
    if said == "differs":
        assert difference > 0.2, "twice the limit of bf16"
    else:
        assert difference <= float(said)
        assert bf16 or continuation in (None, drawn)
