"""From a trained model to a folder of files in one of the formats, which is complete or does not appear."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import CheckpointError, TrainingError
from common.files import atomic_folder, explain
from data.dataset import DataSet
from parallel.strategy import Strategy
from training.export import repository
from training.export.program import ONNX, PROGRAM, write_onnx, write_program
from training.export.served import serve, tokenizer, write_texts

WEIGHTS = "model.safetensors"
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_KINDS = {"auto": "KIND_AUTO", "cpu": "KIND_CPU", "cuda": "KIND_GPU"}


def check_export(cfg: Any) -> None:
    """Check what can be checked before a checkpoint is read.

    Raises:
        TrainingError: For a package that is not installed and settings that make no sense.
    """
    form = cfg.export.format
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing and form in ("onnx", "triton"):
        raise TrainingError(
            f"export.format={form} needs {' and '.join(missing)}, not installed here: "
            "pip install -r requirements-serving.txt"
        )
    if form != "triton":
        return
    if cfg.export.max_batch_size < 1:
        raise TrainingError(f"export.max_batch_size={cfg.export.max_batch_size} must be at least 1")
    if cfg.device not in _KINDS:
        raise TrainingError(
            f"device={cfg.device}: Triton runs models on device=cpu or cuda; auto leaves it to the server"
        )


def write(cfg: Any, folder: Path, data: DataSet, strategy: Strategy) -> str:
    """Write the model that ``strategy`` holds in the format ``cfg.export.format``.

    Args:
        cfg: The configuration.
        folder: A folder that does not exist.
        data: The model's data set.
        strategy: Holds the whole model, on the CPU.

    Returns:
        What was written: the files' names and, where another program has computed it too, the largest difference.

    Raises:
        TrainingError: For a model that the format cannot hold, or whose answers differ.
        CheckpointError: For files that cannot be written.
    """
    form, said = cfg.export.format, ""
    try:
        with atomic_folder(folder) as draft:
            if form == "safetensors":
                write_weights(draft, data, strategy)
            else:
                model = serve(cfg.model.name, data, strategy)
                if form == "triton":
                    said = repository.write(draft, model, cfg.export.max_batch_size, _KINDS[cfg.device])
                else:
                    write_texts(draft, model.texts)
                    onnx = form == "onnx"
                    said = write_onnx(draft / ONNX, model) if onnx else write_program(draft / PROGRAM, model)
            names = ", ".join(sorted(str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file()))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} could not be written: {explain(error, folder)}") from error
    return names + (f"; {said}" if said else "")


def write_weights(folder: Path, data: DataSet, strategy: Strategy) -> None:
    """Write the weights as other programs read them, and what belongs to them.

    A model that has a Hugging Face counterpart (``Chain.hugging_face``) goes under its names, with config.json and the
    tokenizer, so that ``from_pretrained(folder)`` gives the same logits. Other models are a plain state dict under
    their own names (ResNet-50's are torchvision's).
    """
    chain, state = strategy.chain, strategy.state_dict()
    texts = tokenizer(data, chain)
    if chain.hugging_face is not None:
        state, config = chain.hugging_face.export(state, data.vocab_size)
        texts["config.json"] = json.dumps(config, indent=1)
    # transformers refuses a file without this metadata
    save_file({k: v.contiguous() for k, v in state.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    write_texts(folder, texts)
