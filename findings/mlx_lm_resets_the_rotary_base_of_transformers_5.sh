#!/usr/bin/env bash
# mlx-lm 0.32.2: a Llama 3 that transformers 5 has saved gets the rotary base 10000 instead of 500000.
#
# Guess: mlx-lm, which depends on transformers 5, reads what save_pretrained writes: a Llama 3 that was loaded,
# fine-tuned and saved has the logits that it has with the published config.json.
# Seen: transformers 5 writes the base and the scaling into rope_parameters only. mlx-lm's llama and mistral read
# rope_theta and rope_scaling, which published files have, and take 10000 and no scaling without them. There is no warning.
# Qwen3 reads rope_parameters; Qwen2 and Mixtral are right as long as their base is the default, 1000000.
# Source: mlx_lm/models/llama.py, ModelArgs; qwen3.py has a comment about transformers 5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check numpy==2.3.4 transformers==5.24.0 \
    "mlx[cpu]==0.32.4" mlx-lm==0.32.2
cd "$folder"
cat > finding.py << 'PROGRAM'
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import transformers
from mlx.utils import tree_map
from mlx_lm.utils import load_model

print("mlx-lm", version("mlx-lm"), "transformers", version("transformers"))
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
llama3["original_max_position_embeddings"] = 16
mx.random.seed(1)
tokens = mx.random.randint(0, 100, (1, 48))


def logits(**keys):
    """Those of the folder, with further keys in its config.json."""
    return load_model(Path("model"), model_config=keys)[0](tokens)


for name, kind in (("llama", transformers.LlamaConfig), ("mistral", transformers.MistralConfig)):
    config = kind(**sizes, num_key_value_heads=2, sliding_window=None, rope_parameters={**llama3, "rope_theta": 5e5})
    config.save_pretrained("model")
    model, _ = load_model(Path("model"), strict=False)  # no weights yet
    model.update(tree_map(lambda weight: 0.3 * mx.random.normal(weight.shape), model.parameters()))
    model.save_weights("model/model.safetensors")
    seen, wanted, plain = logits(), logits(rope_theta=5e5, rope_scaling=llama3), logits(rope_theta=1e4)
    off, other = mx.abs(seen - wanted).max().item(), mx.abs(seen - plain).max().item()
    print(f"{name}, difference from the logits with rope_theta and rope_scaling: guess: 0; seen: {off:.2g}")
    print(f"{name}, difference from those of a base of 10000 without scaling: {other:.2g}")
    assert off > 0.1 and other == 0
    Path("model/model.safetensors").unlink()
PROGRAM
venv/bin/python -W ignore finding.py
