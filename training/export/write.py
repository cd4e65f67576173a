"""From a trained model to a folder of files in one of the formats, which is complete or does not appear."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from common.errors import CheckpointError, TrainingError
from common.files import atomic_folder, explain
from data.dataset import DataSet
from parallel.strategy import Strategy
from training.export import onnx_model, program, repository, weights
from training.export.served import serve

_ONNX = ("onnx", "onnxscript", "onnxruntime")
_PACKAGES = {"onnx": _ONNX, "triton": _ONNX}
_KINDS = {"auto": "KIND_AUTO", "cpu": "KIND_CPU", "cuda": "KIND_GPU"}


def check_export(cfg: Any) -> None:
    """Check what can be checked before a checkpoint is read.

    Raises:
        TrainingError: For a package that is not installed and settings that make no sense.
    """
    form = cfg.export.format
    missing = [name for name in _PACKAGES.get(form, ()) if importlib.util.find_spec(name) is None]
    if missing:
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
    form, name = cfg.export.format, cfg.model.name
    try:
        with atomic_folder(folder) as draft:
            if form == "safetensors":
                weights.write(draft, data, strategy)
                said = ""
            elif form == "torch_export":
                said = program.write(draft, serve(name, data, strategy))
            elif form == "onnx":
                said = onnx_model.write(draft, serve(name, data, strategy))
            else:
                said = repository.write(
                    draft, serve(name, data, strategy), cfg.export.max_batch_size, _KINDS[cfg.device]
                )
            names = ", ".join(sorted(str(path.relative_to(draft)) for path in draft.rglob("*") if path.is_file()))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} could not be written: {explain(error, folder)}") from error
    return names + (f"; {said}" if said else "")
