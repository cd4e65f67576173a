#!/usr/bin/env bash
# transformers 5.24.0, tokenizers 0.23.3: save_pretrained keeps the truncation and padding of the last call.
#
# Guess: truncation=True, max_length=8 are arguments of one call, so a tokenizer that is saved afterwards is the same as
# one that is saved before.
# Seen: tokenizer.json gets "truncation" and "padding". The library tokenizers then cuts each text to 8 tokens, or fills
# it up to 8, without a warning. transformers itself ignores both when it reads the file, so whoever saved it does not
# see it. A script that shortens its texts and saves model and tokenizer at its end writes such files.
# Source: transformers/tokenization_utils_tokenizers.py, set_truncation_and_padding changes the tokenizer itself.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
cat > finding.py << 'PROGRAM'
from importlib.metadata import version

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

print("transformers", version("transformers"), "tokenizers", version("tokenizers"))
words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?")
LONG, SHORT = "a b " * 20, "a"


def lengths():
    tokenizer.save_pretrained("saved")
    read, again = Tokenizer.from_file("saved/tokenizer.json"), AutoTokenizer.from_pretrained("saved")
    return [len(read.encode(text).ids) for text in (LONG, SHORT)], [len(again(text).input_ids) for text in (LONG, SHORT)]


before = lengths()
tokenizer([LONG, SHORT], truncation=True, padding="max_length", max_length=8)
seen, by_transformers = lengths()
print("tokens of texts of 40 and 1 words: guess: [40, 1]; seen:", seen, "| by transformers:", by_transformers)
assert before == ([40, 1], [40, 1]) and seen == [8, 8] and by_transformers == [40, 1]
PROGRAM
venv/bin/python -W ignore finding.py
