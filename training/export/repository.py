"""A model repository for NVIDIA's Triton Inference Server.

    README.md                what is asked and answered, and how the server is started
    NAME/config.pbtxt        inputs, outputs, batching
    NAME/1/model.onnx        version 1 of the model
    NAME/labels.txt          the names of the classes
    NAME/example.safetensors inputs, and what the model answers

``serve_check`` asks a server for the example and compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from training.export.program import ONNX, write_onnx
from training.export.served import LABELS, ServedModel, TensorInfo, write_texts

EXAMPLE = "example.safetensors"
_EXAMPLES = 2


def write(folder: Path, model: ServedModel, max_batch_size: int, kind: str) -> str:
    """Write the repository; returns the sentence of the comparison by ONNX Runtime.

    Args:
        folder: The repository, an empty folder.
        model: Its only model.
        max_batch_size: Samples that the server may compute together.
        kind: Where: KIND_CPU, KIND_GPU or KIND_AUTO.

    Raises:
        TrainingError: Where ONNX Runtime's answers differ from the model's.
        OSError: A file cannot be written.
        SafetensorError: Likewise.
    """
    home = folder / model.name
    (home / "1").mkdir(parents=True)
    said = write_onnx(home / "1" / ONNX, model)
    write_texts(home, model.texts)
    (home / "config.pbtxt").write_text(config(model, max_batch_size, kind), encoding="utf-8")
    inputs = model.example(min(_EXAMPLES, max_batch_size))
    tensors = dict(zip(model.names, inputs, strict=True)) | {model.gives.name: model.answer(*inputs)}
    # A number per sample is [batch, 1] for Triton.
    tensors = {name: tensor[:, None] if tensor.ndim == 1 else tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, home / EXAMPLE)
    readme = _render("README.md", model, example=EXAMPLE, examples=len(inputs[0]))
    (folder / "README.md").write_text(readme, encoding="utf-8")
    return said


def config(model: ServedModel, max_batch_size: int, kind: str) -> str:
    """The content of config.pbtxt."""
    return _render("config.pbtxt", model, max_batch_size=max_batch_size, kind=kind)


def _render(name: str, model: ServedModel, **settings: Any) -> str:
    """Fill in the template of a file, which lies beside this module."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {"kind": _kind, "dims": _dims, "describe": _describe}
    labels = LABELS if LABELS in model.texts else None
    return templates.get_template(f"{name}.jinja").render(settings, model=model, labels=labels)


def _describe(info: TensorInfo) -> str:
    dims = ["batch", *("tokens" if n < 0 else str(n) for n in _dims(info))]
    return f"`{info.name}`, {_kind(info)} [{', '.join(dims)}]"


def _dims(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape of one sample: a number alone is [1] for Triton."""
    return info.dims or (1,)


def _kind(info: TensorInfo) -> str:
    """Return Triton's name of a dtype: FP32, INT64, BOOL."""
    return str(info.dtype).removeprefix("torch.").upper().replace("FLOAT", "FP")
