#!/usr/bin/env bash
# mlx-lm 0.32.2: a Llama 3 that transformers 5 has saved gets the rotary base 10000 instead of 500000.
#
# Guess: mlx-lm, which depends on transformers 5, reads what save_pretrained writes: the logits of a Llama 3 that was
# loaded, fine-tuned and saved are those of transformers, as they are for the published files.
# Seen: transformers 5 writes the base and the scaling into rope_parameters only. mlx-lm's llama and mistral read
# rope_theta and rope_scaling, which published files have, and take 10000 and no scaling without them. There is no warning.
# With both keys beside rope_parameters the logits agree in both libraries. Qwen3 reads rope_parameters; Qwen2 and Mixtral
# are right as long as their base is the default, 1000000.
# Source: mlx_lm/models/llama.py, ModelArgs; qwen3.py has a comment about transformers 5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4 transformers==5.24.0 \
    "mlx[cpu]==0.32.4" mlx-lm==0.32.2
cd "$folder"
cat > finding.py << 'PROGRAM'
import json
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model

print("mlx-lm", version("mlx-lm"), "transformers", version("transformers"))
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
llama3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
llama3["original_max_position_embeddings"] = 16
plain = dict(rope_type="default", rope_theta=1e4)
tokens = torch.randint(100, (1, 48), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def of_transformers(**changed):
    return transformers.AutoModelForCausalLM.from_pretrained("model", **changed).eval()(tokens).logits.numpy()


def of_mlx():
    return np.array(load_model(Path("model"))[0](mx.array(tokens.numpy())))


for name, kind in (("llama", transformers.LlamaConfig), ("mistral", transformers.MistralConfig)):
    torch.manual_seed(1)
    config = kind(**sizes, num_key_value_heads=2, initializer_range=0.3, rope_parameters=llama3, sliding_window=None)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
    wanted, of_plain, seen = of_transformers(), of_transformers(rope_parameters=plain), of_mlx()
    off, other = abs(seen - wanted).max(), abs(seen - of_plain).max()
    print(f"{name}: largest difference: guess: below 0.001; seen: {off:.2g} (from a base of 10000, unscaled: {other:.2g})")
    assert off > 0.1 and other < 1e-3
    path = Path("model/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5e5, "rope_scaling": llama3}))
    both = abs(of_mlx() - wanted).max(), abs(of_transformers() - wanted).max()
    print(f"{name} with rope_theta and rope_scaling beside: {both[0]:.2g} (transformers: {both[1]:.2g})")
    assert max(both) < 1e-3
PROGRAM
venv/bin/python -W ignore finding.py
