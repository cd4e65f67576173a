#!/usr/bin/env bash
# CTranslate2 4.8.5: a converted Llama 3.1 has no scaling of its rotary embeddings.
#
# Guess: the converter reads rope_type llama3 and its factors, so a converted model gives the logits of transformers.
# Seen: the logits are those of the same weights with rope_type default, without a warning. The converter reads factor,
# low_freq_factor and high_freq_factor, but not original_max_position_embeddings. Llama 3.1, 3.2 and 3.3 have this
# scaling, so their converted models compute other logits.
# Source: ctranslate2/converters/transformers.py, LlamaLoader.get_model_spec.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.3.4 \
    transformers==5.24.0 ctranslate2==4.8.5
cd "$folder"
cat > finding.py << 'PROGRAM'
from importlib.metadata import version

import ctranslate2
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models

print("ctranslate2", version("ctranslate2"), "transformers", version("transformers"))
words = {f"<{i}>": i for i in range(100)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
names = dict(unk_token="<0>", bos_token="<0>", eos_token="<0>")
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained("model")
llama3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
llama3["original_max_position_embeddings"] = 64
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
torch.manual_seed(1)
config = transformers.LlamaConfig(**sizes, initializer_range=0.3, max_position_embeddings=512, rope_parameters=llama3)
model = transformers.LlamaForCausalLM(config).eval()
model.save_pretrained("model")
plain = dict(rope_type="default", rope_theta=1e4)
other = transformers.LlamaForCausalLM.from_pretrained("model", rope_parameters=plain).eval()
tokens = torch.randint(100, (1, 48))
with torch.no_grad():
    wanted, of_plain = model(tokens).logits.numpy(), other(tokens).logits.numpy()
ctranslate2.converters.TransformersConverter("model").convert("converted")
given = np.array(ctranslate2.Generator("converted").forward_batch(tokens.tolist()))
of_llama3, of_plain = abs(given - wanted).max(), abs(given - of_plain).max()
print(f"largest difference from transformers: guess: below 0.001; seen: {of_llama3:.2g} (unscaled: {of_plain:.2g})")
assert of_plain < 1e-3 and of_llama3 > 0.1
PROGRAM
venv/bin/python -W ignore finding.py
