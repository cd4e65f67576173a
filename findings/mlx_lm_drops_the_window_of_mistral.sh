#!/usr/bin/env bash
# mlx-lm 0.32.2: a Mistral with a sliding window attends to the whole text.
#
# Guess: mlx-lm reads sliding_window in the config.json of a Mistral, so it gives the logits of transformers.
# Seen: mistral is run as llama, which has a window only in layers that layer_types names, and a Mistral has no
# layer_types. The logits are those of sliding_window null, without a warning. Texts within the window (4096 tokens in
# Mistral 7B v0.1) are right.
# Source: mlx_lm/utils.py, MODEL_REMAPPING; mlx_lm/models/llama.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4 transformers==5.24.0 \
    "mlx[cpu]==0.32.4" mlx-lm==0.32.2
cd "$folder"
cat > finding.py << 'PROGRAM'
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.utils import load_model

print("mlx-lm", version("mlx-lm"), "transformers", version("transformers"))
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
torch.manual_seed(1)
config = transformers.MistralConfig(**sizes, num_key_value_heads=2, initializer_range=0.3, sliding_window=8)
model = transformers.MistralForCausalLM(config).eval()
model.save_pretrained("model")
whole = transformers.MistralForCausalLM.from_pretrained("model", sliding_window=None).eval()
tokens = torch.randint(100, (1, 24))
with torch.no_grad():
    wanted, of_whole = model(tokens).logits.numpy(), whole(tokens).logits.numpy()
given = np.array(load_model(Path("model"))[0](mx.array(tokens.numpy())))
within, beyond, of_whole = abs(given - wanted)[:, :8].max(), abs(given - wanted).max(), abs(given - of_whole).max()
print(f"largest difference from transformers: guess: below 0.001; seen: {beyond:.2g}")
print(f"within the window: {within:.2g}; from a model without a window: {of_whole:.2g}")
assert within < 1e-3 and of_whole < 1e-3 and beyond > 0.1
PROGRAM
venv/bin/python -W ignore finding.py
