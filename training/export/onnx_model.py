"""A model in the format of ONNX."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch

from training.export.program import free_axes, trace
from training.export.served import ServedModel, write_texts

MODEL = "model.onnx"
OPSET = 18  # the newest that torch's exporter writes by itself; any ONNX Runtime since 1.14 reads it


def write(folder: Path, model: ServedModel) -> str:
    """Write the model, and what belongs to it; returns the sentence of its comparison.

    Raises:
        TrainingError: Where ONNX Runtime's answers differ from the model's.
        OSError: A file cannot be written.
    """
    write_texts(folder, model)
    return write_model(folder / MODEL, model)


def write_model(path: Path, model: ServedModel) -> str:
    """Write the model's file, with a second one beside it for weights beyond 2 GB, and compare it with the model.

    Returns:
        The comparison's sentence.

    Raises:
        TrainingError: Where ONNX Runtime's answers differ from the model's.
        OSError: A file cannot be written.
    """
    for package in ("onnx_ir", "onnxscript"):  # which describe each change that they make
        logging.getLogger(package).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own code
        converted = torch.onnx.export(
            trace(model),
            dynamo=True,
            dynamic_shapes=({axis: dim.__name__ for axis, dim in free_axes(model).items()},),  # their names
            input_names=[model.takes.name],
            output_names=[model.gives.name],
            opset_version=OPSET,
            verbose=False,
        )
    converted.save(path)
    return compare_onnx(path, model)


def compare_onnx(path: Path, model: ServedModel) -> str:
    """Compare ONNX Runtime's answers on this machine's CPU with the model's.

    Raises:
        TrainingError: Where they differ.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(inputs: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run([model.gives.name], {model.takes.name: inputs.numpy()})[0])

    return model.compare(run, "ONNX Runtime")
