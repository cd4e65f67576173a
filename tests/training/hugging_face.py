"""A folder as Hugging Face's, with a tiny random model and a tokenizer made on the spot: nothing is downloaded."""

import json
from pathlib import Path

import torch

from common.packages import load_torchvision

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROWS = [
    {"question": f"Ann has {a} apples and {b} pears. How many fruits?", "answer": f"{a} + {b} is {a + b}"}
    for a in range(20)
    for b in range(20)
]

EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def make_folder(folder: Path, kind: str = "Llama", parts: str | None = None, **config) -> Path:
    """Write a folder, in parts of at most so many bytes; ``config`` replaces numbers of its config.json."""
    load_torchvision()  # or transformers fails where torchvision does not fit a CPU torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(row.values()) for row in ROWS], trainer)
    names = dict(bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    sizes = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, vocab_size=416, max_position_embeddings=128, tie_word_embeddings=True)
    sizes |= dict(bos_token_id=0, eos_token_id=2, pad_token_id=0, initializer_range=0.1)
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **config})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(folder, **({"max_shard_size": parts} if parts else {}))
    return folder


def write_rows(folder: Path) -> Path:
    """Write train.jsonl and test.jsonl."""
    folder.mkdir()
    for name, rows in (("train", ROWS[:-40]), ("test", ROWS[-40:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_pairs(folder: Path) -> Path:
    """Write train.jsonl, valid.jsonl and test.jsonl of prompts with a right and a wrong answer."""
    folder.mkdir()
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": row["answer"].replace(" is ", " is not ")}
        for row in ROWS
    ]
    for name, some in (("train", pairs[:32]), ("valid", pairs[32:45]), ("test", pairs[45:55])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in some))
    return folder


def words(folder: Path, rows: Path, *more: str, model: str = "llama") -> list[str]:
    """Return the command line of a training on the rows' answers that starts from a folder."""
    data = ["data=jsonl", f"data.root='{rows}'", "data.field=question", "data.answer=answer", "data.seq_len=64"]
    return [f"model={model}", f"model.init_from='{folder}'", *data, "train.global_batch_size=8", *more]


def make_gpt2(folder: Path) -> Path:
    """Write a small random GPT-2, without a tokenizer: its tokens are GPT-2's."""
    load_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=256))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder
