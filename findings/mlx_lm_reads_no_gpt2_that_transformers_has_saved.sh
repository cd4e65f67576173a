#!/usr/bin/env bash
# mlx-lm 0.32.2: it reads the published GPT-2, but none that transformers has saved.
#
# Guess: a GPT-2 that was fine-tuned and saved with save_pretrained has the format of the published one.
# Seen: mlx-lm wants n_ctx in config.json, which transformers 5 does not write, and the published names of weights, such
# as h.0.attn.c_attn.weight. transformers saves transformer.h.0.attn.c_attn.weight, and mlx-lm ends with "parameters not
# in model". With n_ctx and without the prefix it reads the file; transformers reads both.
# Source: mlx_lm/models/gpt2.py, Model.sanitize.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.3.4 \
    transformers==5.24.0 "mlx[cpu]==0.32.4" mlx-lm==0.32.2
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
from safetensors.torch import load_file, save_file

print("mlx-lm", version("mlx-lm"), "transformers", version("transformers"))
torch.manual_seed(1)
config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=64, vocab_size=100, initializer_range=0.3)
model = transformers.GPT2LMHeadModel(config).eval()
model.save_pretrained("model")


def tried():
    try:
        load_model(Path("model"))
        return "it is read"
    except (TypeError, ValueError) as error:
        return str(error).partition("\n")[0]


seen = [tried()]
path = Path("model/config.json")
path.write_text(json.dumps({**json.loads(path.read_text()), "n_ctx": 64}))
seen += [tried()]
print("guess: it is read; seen:", seen[0], "| with n_ctx:", seen[1])
assert "'n_ctx'" in seen[0] and "parameters not in model" in seen[1]
file = Path("model/model.safetensors")
tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
save_file(tensors, file, metadata={"format": "pt"})
tokens = torch.randint(100, (1, 24))
with torch.no_grad():
    wanted = model(tokens).logits.numpy()
    again = transformers.GPT2LMHeadModel.from_pretrained("model").eval()(tokens).logits.numpy()
given = np.array(load_model(Path("model"))[0](mx.array(tokens.numpy())))
of_mlx, of_transformers = abs(given - wanted).max(), abs(again - wanted).max()
print(f"without the prefix: mlx-lm differs by {of_mlx:.2g}, transformers by {of_transformers:.2g}")
assert of_mlx < 1e-3 and of_transformers < 1e-5
PROGRAM
venv/bin/python -W ignore finding.py
