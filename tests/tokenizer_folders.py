"""Folders with a small tokenizer, in the styles of published ones, trained on a few sentences."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = ["Natalia sold 48/2 = 24 clips in May.", "How many clips did she sell altogether?", "The answer is 72.\n\n"] * 20
# How Qwen2 and Llama 3 split words.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# As Qwen2.5 and SmolLM2 have them; as Llama 3.2 does, which writes today's date; as SmolLM3 marks answers; as Mistral's
# refuse what they do not know.
CHATML = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """{{- bos_token }}
{%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MARKED = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}

{%- else %}
{%- if loop.index0 > 5 %}{% break %}{% endif %}
<|im_start|>{{ message.role }}
{{ {'text': '<' ~ message.content} | tojson }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
REFUSING = """{{ bos_token }}{% for message in messages %}
{%- if message.content == 'unknown' %}{{ raise_exception('I know no such question') }}{% endif %}
{%- if message.role == 'user' %}[INST] {{ message.content }} [/INST]{% else %} {{ message.content }}{{ eos_token }}
{%- endif %}{% endfor %}"""


def _bytes(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(special)
    return tokenizer


def _qwen() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _bytes(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}


def _llama3() -> tuple[Tokenizer, dict[str, Any]]:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = _bytes(special)
    begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer.enable_truncation(4)  # as the file of some published ones says, which transformers does not heed
    tokenizer.enable_padding(length=7, pad_token="<|eot_id|>", pad_id=tokenizer.token_to_id("<|eot_id|>"))
    return tokenizer, {
        "bos_token": begin[0],
        "eos_token": {"__type": "AddedToken", "content": "<|eot_id|>"},
        "chat_template": LLAMA3,
    }


def _llama2() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    space = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), space])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(TEXT).replace(" ", "▁")], trainer)
    tokenizer = Tokenizer.from_str(_without_bytes(tokenizer.to_str()))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": REFUSING}


def _without_bytes(text: str) -> str:
    """The tokens of bytes are words of the model, not added ones."""
    content = json.loads(text)
    content["added_tokens"] = content["added_tokens"][:3]
    return json.dumps(content)


STYLES = {"qwen": _qwen, "llama3": _llama3, "llama2": _llama2}


def tokenizer_folder(folder: Path, style: str = "qwen", **settings: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json, with ``settings`` in the place of the style's own; None: none."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, given = STYLES[style]()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {name: value for name, value in {**given, **settings}.items() if value is not None}
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder
