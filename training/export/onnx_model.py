"""A model in the format of ONNX."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from training.export.program import free_axes, not_exported, trace
from training.export.served import ServedModel, write_texts

MODEL = "model.onnx"
OPSET = 18  # the newest that torch's exporter writes by itself; any ONNX Runtime since 1.14 reads it


def write(folder: Path, model: ServedModel) -> str:
    """Write the model, and what belongs to it; returns the sentence of its comparison.

    Raises:
        TrainingError: Where torch cannot export the model, or ONNX Runtime's answers differ from the model's.
        OSError: A file cannot be written.
    """
    write_texts(folder, model)
    return write_model(folder / MODEL, model)


def write_model(path: Path, model: ServedModel) -> str:
    """Write the model's file, with a second one beside it for weights beyond 2 GB, and compare it with the model.

    Returns:
        The comparison's sentence.

    Raises:
        TrainingError: Where torch cannot export the model, or ONNX Runtime's answers differ from the model's.
        OSError: A file cannot be written.
    """
    for package in ("onnx_ir", "onnxscript"):  # which describe each change that they make
        logging.getLogger(package).setLevel(logging.WARNING)
    program = trace(model)
    axes = {axis: dim.__name__ for axis, dim in free_axes(model).items()}  # with their names
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
        raise not_exported(model, error) from error
    converted.save(path)
    return model.compare(session_of(path, model), "ONNX Runtime")


def session_of(path: Path, model: ServedModel) -> Callable[..., Tensor]:
    """The model's file as ONNX Runtime computes it on this machine's CPU: inputs -> outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        named = {name: tensor.numpy() for name, tensor in zip(model.names, inputs, strict=True)}
        return torch.from_numpy(session.run([model.gives.name], named)[0])

    return run
