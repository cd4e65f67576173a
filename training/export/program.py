"""A model as a program that runs without this project's code: torch.export's .pt2 file, or ONNX."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from common.errors import TrainingError
from training.export.served import ServedModel

PROGRAM, ONNX = "model.pt2", "model.onnx"
OPSET = 18  # the newest that torch's exporter writes by itself; any ONNX Runtime since 1.14 reads it


def write_program(path: Path, model: ServedModel) -> str:
    """Write torch.export's program, read it again and compare it with the model; returns the comparison's sentence.

    Raises:
        TrainingError: torch cannot export the model, or the two differ.
        OSError: The file cannot be written.
    """
    # Not straight to the file: torch's writer reports a full disk as an error of its own.
    content = io.BytesIO()
    torch.export.save(_trace(model), content)
    path.write_bytes(content.getbuffer())
    return model.compare(torch.export.load(path).module(), "torch.export's program")


def write_onnx(path: Path, model: ServedModel) -> str:
    """Write the ONNX file, with a second one beside it for weights beyond 2 GB, and compare it as ``write_program``.

    Raises:
        TrainingError: torch cannot export the model, or ONNX Runtime's answers differ from the model's.
        OSError: A file cannot be written.
    """
    for package in ("onnx_ir", "onnxscript"):  # which describe each change that they make
        logging.getLogger(package).setLevel(logging.WARNING)
    program = _trace(model)
    axes = {axis: dim.__name__ for axis, dim in _free_axes(model).items()}  # with their names
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter's own code
            converted = torch.onnx.export(
                program,
                dynamo=True,
                dynamic_shapes=(axes,) * len(model.takes),
                input_names=model.names,
                output_names=[model.gives.name],
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:
        raise _not_exported(model, error) from error
    converted.save(path)
    return model.compare(session_of(path, model), "ONNX Runtime")


def session_of(path: Path, model: ServedModel) -> Callable[..., Tensor]:
    """Return the ONNX file as ONNX Runtime computes it on this machine's CPU: inputs -> outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        named = {name: tensor.numpy() for name, tensor in zip(model.names, inputs, strict=True)}
        return torch.from_numpy(session.run([model.gives.name], named)[0])

    return run


def _free_axes(model: ServedModel) -> dict[int, Dim]:
    """Return the axes of each input that may have any length: the batch and, for a language model, the tokens."""
    axes = {0: Dim("batch")}
    if model.takes_tokens:
        axes[1] = Dim("time", max=model.positions)
    return axes


def _trace(model: ServedModel) -> ExportedProgram:
    inputs, axes = model.example(2), _free_axes(model)
    try:
        return torch.export.export(model.module, inputs, dynamic_shapes=(axes,) * len(inputs), strict=False)
    except Exception as error:  # of many kinds: whatever a layer does that is no graph
        raise _not_exported(model, error) from error


def _not_exported(model: ServedModel, error: Exception) -> TrainingError:
    reason = str(error).strip().partition("\n")[0]
    return TrainingError(f"torch cannot export model={model.name}: {type(error).__name__}: {reason}")
