"""A model as a program of torch.export: a .pt2 file that runs without this project's code."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram

from common.errors import TrainingError
from training.export.served import ServedModel, write_texts

PROGRAM = "model.pt2"


def free_axes(model: ServedModel) -> dict[int, Dim]:
    """The axes of each input that may have any length: the batch and, for a language model, the tokens."""
    axes = {0: Dim("batch")}
    if model.takes_tokens:
        axes[1] = Dim("time", max=model.positions)
    return axes


def trace(model: ServedModel) -> ExportedProgram:
    """Export the model with its free axes.

    Raises:
        TrainingError: Where torch cannot.
    """
    inputs = model.example(2)
    try:
        return torch.export.export(model.module, inputs, dynamic_shapes=(free_axes(model),) * len(inputs), strict=False)
    except Exception as error:  # of many kinds: whatever a layer does that is no graph
        raise not_exported(model, error) from error


def not_exported(model: ServedModel, error: Exception) -> TrainingError:
    """The error for a model that torch cannot export."""
    reason = str(error).strip().partition("\n")[0]
    return TrainingError(f"torch cannot export model={model.name}: {type(error).__name__}: {reason}")


def write(folder: Path, model: ServedModel) -> str:
    """Write the program, read it again and compare it with the model; returns the comparison's sentence.

    Raises:
        TrainingError: Where the two differ.
        OSError: The file cannot be written.
    """
    # Not straight to the file: torch's writer reports a full disk as an error of its own.
    content = io.BytesIO()
    torch.export.save(trace(model), content)
    (folder / PROGRAM).write_bytes(content.getbuffer())
    write_texts(folder, model)
    return model.compare(torch.export.load(folder / PROGRAM).module(), "torch.export's program")
