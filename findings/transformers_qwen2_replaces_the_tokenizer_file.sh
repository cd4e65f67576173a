#!/usr/bin/env bash
# transformers 5.24.0: AutoTokenizer replaces pre-tokenizer and normalizer of tokenizer.json if config.json says qwen2.
#
# Guess: tokenizer.json is complete, so AutoTokenizer.from_pretrained(folder) gives the ids of the file, above all as
# tokenizer_config.json asks for PreTrainedTokenizerFast.
# Seen: with model_type qwen2 in config.json the class is Qwen2Tokenizer, with NFC and its own split. A decomposed accent,
# which the file keeps as it is, gets other ids. PreTrainedTokenizerFast.from_pretrained(folder) reads the file.
# Source: transformers/models/auto/tokenization_auto.py, MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS;
# transformers/models/qwen2/tokenization_qwen2.py sets normalizer and pre_tokenizer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 tokenizers
cd "$folder"
cat > finding.py << 'PROGRAM'
import json

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

print("transformers", transformers.__version__)
vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.save("tokenizer.json")
json.dump({"tokenizer_class": "PreTrainedTokenizerFast"}, open("tokenizer_config.json", "w"))
json.dump({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, open("config.json", "w"))
text = "e\u0301"  # an e and a combining accent
ids = tokenizer.encode(text).ids
auto = transformers.AutoTokenizer.from_pretrained(".")
fast = transformers.PreTrainedTokenizerFast.from_pretrained(".")
print("ids of the file:", ids)
print(f"AutoTokenizer: guess: the same; seen: {auto(text)['input_ids']} of {type(auto).__name__}")
print("PreTrainedTokenizerFast:", fast(text)["input_ids"])
assert fast(text)["input_ids"] == ids != auto(text)["input_ids"]
PROGRAM
venv/bin/python -W ignore finding.py
