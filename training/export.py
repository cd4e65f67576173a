"""mode=export: a checkpoint's weights as other programs read them.

GPT-2 goes under Hugging Face's names, with config.json and the tokenizer beside, so that
``transformers.GPT2LMHeadModel.from_pretrained(folder)`` gives the same logits; the rows that pad its vocabulary are
left out. Other models are a plain state dict under their own names (ResNet-50's are torchvision's).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from common.errors import CheckpointError, TrainingError
from data.dataset import DataSet
from data.huggingface_tokenizer import tokenizer_files
from data.vocabulary import END_OF_TEXT, GPT2Vocabulary
from models.gpt2 import resolve_size
from models.huggingface import EMBEDDING, to_huggingface
from training.alone import restore

WEIGHTS = "model.safetensors"


def export(cfg: Any, run_dir: Path) -> str:
    """Write the checkpoint ``cfg.checkpoint`` to the folder ``cfg.export_to`` of ``run_dir``; returns what to tell.

    The folder appears whole or not at all. Raises TrainingError for a folder that is outside of ``run_dir`` or there
    already, CheckpointError where it cannot be written.
    """
    folder = _inside(run_dir, cfg.export_to)
    restored = restore(cfg, "cpu")
    vocabulary = restored.data.vocabulary
    state, texts = restored.strategy.state_dict(), {}
    if cfg.model.name == "gpt2":
        kept = _vocab_size(restored.data, len(state[EMBEDDING]))
        state = to_huggingface(state, kept)
        del state["lm_head.weight"]  # tied: transformers takes it from the embedding
        texts["config.json"] = json.dumps(_gpt2_config(cfg.model, kept, state), indent=1)
    if isinstance(vocabulary, GPT2Vocabulary):
        texts |= tokenizer_files(vocabulary.extra, restored.chain.limits["positions"])
    elif vocabulary is not None:
        restored.data.prepare()
        texts["vocabulary.txt"] = "\n".join(vocabulary.words) + "\n"
    try:
        _write(folder, state, texts)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} could not be written: {error}") from error
    return f"exported {cfg.model.name} after step {restored.step} to {folder}: {', '.join([WEIGHTS, *texts])}"


def _inside(run_dir: Path, name: str) -> Path:
    wanted = Path(name)
    if wanted.is_absolute() or ".." in wanted.parts or not wanted.parts:
        raise TrainingError(f"export_to={name} must be a folder in the run directory, such as export_to=export")
    folder = Path(run_dir).absolute() / wanted
    if folder.exists():
        raise TrainingError(f"{folder} is there already; choose another export_to=")
    return folder


def _vocab_size(data: DataSet, rows: int) -> int:
    """How many of the embedding's rows are words; the rest are padding."""
    return rows if data.vocab_size is None else min(rows, data.vocab_size)


def _gpt2_config(model: Any, vocab_size: int, state: Mapping[str, Tensor]) -> dict:
    """config.json of a Hugging Face GPT-2."""
    size = resolve_size(model.size, model.n_layer, model.n_head, model.n_embd, model.block_size)
    end = min(END_OF_TEXT, vocab_size - 1)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": size.block_size,
        "n_ctx": size.block_size,
        "n_embd": size.n_embd,
        "n_layer": size.n_layer,
        "n_head": size.n_head,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
        "bos_token_id": end,
        "eos_token_id": end,
        "tie_word_embeddings": True,
        "dtype": str(state["transformer.wte.weight"].dtype).removeprefix("torch."),
    }


def _write(folder: Path, state: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        tensors = {name: tensor.contiguous(memory_format=torch.contiguous_format) for name, tensor in state.items()}
        save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})  # transformers refuses a file without it
        for name, text in texts.items():
            (draft / name).write_text(text, encoding="utf-8")
        for path in [*draft.iterdir(), draft]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.replace(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
