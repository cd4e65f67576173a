"""Weights as other programs read them.

A model that has a Hugging Face counterpart (``Chain.hugging_face``) goes under its names, with config.json and the
tokenizer, so that ``from_pretrained(folder)`` gives the same logits. Other models are a plain state dict under their
own names (ResNet-50's are torchvision's).
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from data.dataset import DataSet
from parallel.strategy import Strategy
from training.export.served import tokenizer

WEIGHTS = "model.safetensors"


def write(folder: Path, data: DataSet, strategy: Strategy) -> None:
    """Write the weights, and what belongs to them.

    Raises:
        OSError: They cannot be written.
        SafetensorError: Likewise.
    """
    chain, state = strategy.chain, strategy.state_dict()
    texts = tokenizer(data, chain)
    if chain.hugging_face is not None:
        state, config = chain.hugging_face.export(state, data.vocab_size)
        texts["config.json"] = json.dumps(config, indent=1)
    # transformers refuses a file without this metadata
    save_file({k: v.contiguous() for k, v in state.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
