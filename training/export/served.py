"""Converts a trained model for other programs: named input tensors and one output, in float32 on the CPU.

The result, torch.export's .pt2 file or ONNX, runs without this project's code.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from common.errors import TrainingError, UserError, brief
from common.packages import load_transformers
from data.dataset import DataSet
from data.images import ImageData
from data.mixture import Mixture
from data.vocabulary import TEMPLATE
from models.chain import Chain, Layers, as_tuple
from models.generate import logits_at
from models.losses import assert_all
from parallel.strategy import Strategy

TOLERANCE = 1e-5  # limit of differences from another program, relative to the largest output, absolute if this is < 1
LABELS = "labels.txt"
PROGRAM, ONNX = "model.pt2", "model.onnx"
OPSET = 18  # the newest that torch's exporter writes without conversion; ONNX Runtime reads it since 1.14
_OUTPUTS = ("logits", "outputs")  # the names of outputs
_FEW_TOKENS = 16
_NO_LIMIT = int(1e30)  # the value that transformers writes for a model without positions


@dataclass(frozen=True)
class TensorInfo:
    """An input or output; ``dims`` is its shape without the batch dimension, -1 for a variable number of tokens."""

    name: str
    dtype: torch.dtype
    dims: tuple[int, ...]


@dataclass(frozen=True)
class ServedModel:
    """A model to be served.

    Attributes:
        name: The model's name.
        module: The module in evaluation mode, without the padding of its vocabulary.
        takes: The model's inputs.
        gives: The model's output.
        samples: Returns inputs from the training data for the indices [b]; None to use random inputs.
        positions: Maximum length of a text in tokens; None if there is no limit, and for other kinds of models.
        texts: The content of the model's text files by name: a tokenizer, labels.
        preparation: A sentence on how inputs must be preprocessed.
    """

    name: str
    module: nn.Module
    takes: tuple[TensorInfo, ...]
    gives: TensorInfo
    samples: Callable[[np.ndarray], tuple[Tensor, ...]] | None = None
    positions: int | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    preparation: str = ""

    @property
    def names(self) -> list[str]:
        """The names of the model's inputs."""
        return [info.name for info in self.takes]

    @property
    def takes_tokens(self) -> bool:
        """Whether the model is a language model."""
        return self.takes[0].dims == (-1,)

    def example(self, batch: int, tokens: int = _FEW_TOKENS) -> tuple[Tensor, ...]:
        """Return the same inputs at every call. A language model gets ``tokens`` tokens, at most its positions."""
        if self.samples is not None:
            return self.samples(np.arange(batch))
        generator = torch.Generator().manual_seed(batch)
        if self.takes_tokens:
            length = tokens if self.positions is None else min(tokens, self.positions)
            return (torch.randint(self.gives.dims[-1], (batch, length), generator=generator),)
        return (torch.randn(batch, *self.takes[0].dims, generator=generator),)

    @torch.no_grad()
    def answer(self, *inputs: Tensor) -> Tensor:
        """Return the model's output."""
        return self.module(*inputs)

    def compare(self, run: Callable[..., Tensor], what: str) -> str:
        """Compare with another program in batches of 1, 2 and 5 and, for a language model, at several lengths.

        Return a sentence with the largest difference. Raises TrainingError if the difference exceeds ``TOLERANCE``.
        """
        largest = 0.0
        for batch, tokens in ((1, _FEW_TOKENS), (5, _FEW_TOKENS), (2, 3 * _FEW_TOKENS), (1, 1)):
            inputs = self.example(batch, tokens)
            wanted, given = self.answer(*inputs), run(*inputs).detach()
            if given.shape != wanted.shape:
                raise TrainingError(f"{what} gives {tuple(given.shape)} where the model gives {tuple(wanted.shape)}")
            difference = float((given - wanted).abs().max())
            if not difference <= TOLERANCE * max(1.0, float(wanted.abs().max())):  # "not <=" is true for NaN, too
                raise TrainingError(
                    f"{what} differs from the model by {difference:.2g} in a batch of {batch}, more than {TOLERANCE:g} "
                    f"of its largest output, {float(wanted.abs().max()):.3g}; nothing was written"
                )
            largest = max(largest, difference)
        return f"largest difference between {what} and the model: {largest:.1e}"


class _Served(nn.Module):
    """All layers. A language model rejects the padding tokens of its vocabulary, and returns no logits for them.

    With ``last``, a language model returns the logits of a text's last position only, [batch, words].
    """

    words_by_token: Tensor

    def __init__(self, layers: Layers, names: list[str], words: int | None, last: bool) -> None:
        super().__init__()
        self.layers, self.words, self.last = layers, words, last
        if words is not None:
            self.register_buffer("words_by_token", torch.arange(words)[:, None], persistent=False)

        def forward(*inputs: Tensor) -> Tensor:
            return self._compute(*inputs)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        self.forward = forward  # torch.export names a program's inputs after the parameters of forward

    def _compute(self, *inputs: Tensor) -> Tensor:
        if self.words is None:
            return self.layers(*inputs)
        (tokens,) = inputs
        known = (tokens >= 0) & (tokens < self.words)
        assert_all(known, f"tokens must be from 0 to {self.words - 1}")
        # ONNX has no assertions, but an index beyond a table is an error: this look-up fails for unknown tokens, and
        # leaves known tokens unchanged.
        tokens = F.embedding(torch.where(known, tokens, self.words), self.words_by_token)[..., 0]
        logits = logits_at(self.layers, tokens, slice(None), -1) if self.last else self.layers(tokens)
        return logits[..., : self.words]


def serve(name: str, data: DataSet, strategy: Strategy, last: bool = False) -> ServedModel:
    """Prepare the model of ``strategy`` for other programs. Its layers are converted to float32 in place.

    With ``last``, a language model returns logits of the last position only.
    """
    # One model has one tokenizer, and one way to prepare images.
    whole, data = data, data.first if isinstance(data, Mixture) else data
    chain, (stage,) = strategy.chain, strategy.stages
    takes, samples = _inputs(data, stage.layers[chain.names[0]])
    texts = tokenizer(data, chain)  # prepares data with a vocabulary from its own text
    words = None if data.seq_len is None else min(filter(None, (data.vocab_size, chain.limits.get("vocabulary"))))
    layers = stage.layers.float()
    layers.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]  # no overload has it
    module = _Served(layers, [info.name for info in takes], words, last).eval()
    gives = _output(name, module, takes, chain)
    if "classes" in chain.limits:
        names, count = whole.class_names(), gives.dims[-1]
        # The model may have more classes than the data.
        texts[LABELS] = "".join(f"{label}\n" for label in [*names, *range(len(names), count)][:count])
    preparation = ""
    if isinstance(data, ImageData) and set(data.std) != {1.0}:
        preparation = f"Pixels are normalized as in training: (pixel - {_list(data.mean)}) / {_list(data.std)}."
    return ServedModel(name, module, takes, gives, samples, chain.limits.get("positions"), texts, preparation)


def _inputs(data: DataSet, first_layer: nn.Module) -> tuple[tuple[TensorInfo, ...], Callable | None]:
    """Return a model's inputs and, if their shapes are only known from the data, a function that reads samples."""
    if data.seq_len is not None:
        return (TensorInfo("tokens", torch.int64, (-1,)),), None
    if isinstance(data, ImageData):
        return (TensorInfo("images", torch.float32, data.image_shape),), None
    data.prepare()

    def samples(indices: np.ndarray) -> tuple[Tensor, ...]:
        inputs = as_tuple(data.train.read(indices % len(data.train), 0)[0])
        return tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs)

    tensors = samples(np.zeros(1, np.int64))
    names = _input_names(first_layer, len(tensors))
    return tuple(TensorInfo(n, t.dtype, tuple(t.shape[1:])) for n, t in zip(names, tensors, strict=True)), samples


def _output(name: str, module: nn.Module, takes: tuple[TensorInfo, ...], chain: Chain) -> TensorInfo:
    """Return the description of the output for two samples of zeros. Raises TrainingError for several outputs."""
    with torch.no_grad():
        output = module(*(torch.zeros(2, *(1 if n < 0 else n for n in info.dims), dtype=info.dtype) for info in takes))
    if not isinstance(output, Tensor):
        raise TrainingError(f"model={name} gives {len(output)} tensors; only a model that gives one can be served")
    dims = tuple(output.shape[1:])
    named = "logits" if {"classes", "vocabulary"} & chain.limits.keys() else "outputs"
    # A language model returns logits for each of a variable number of tokens, or only for the last token.
    return TensorInfo(named, output.dtype, (-1, dims[1]) if takes[0].dims == (-1,) and len(dims) > 1 else dims)


def _input_names(layer: nn.Module, count: int) -> list[str]:
    """Return the names of a model's inputs: "inputs" for a single one, otherwise the first layer's parameters."""
    if count == 1:
        return ["inputs"]
    parameters = list(inspect.signature(layer.forward).parameters.values())[:count]
    named = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD and p.name not in _OUTPUTS]
    return named if len(named) == count else [f"inputs_{i}" for i in range(count)]


def tokenizer(data: DataSet, chain: Chain) -> dict[str, str]:
    """Return the files that convert text to tokens: a tokenizer in Hugging Face's format, or the list of words."""
    if data.vocabulary is None:
        return {}
    if data.vocabulary.size is None:
        data.prepare()
    files = data.vocabulary.files(chain.limits.get("positions", _NO_LIMIT))
    template = getattr(data.vocabulary, "template", None)
    return files if template is None else {**files, TEMPLATE: template}


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files that belong to a model."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")


def _list(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def write_program(path: Path, model: ServedModel) -> str:
    """Write the program of torch.export, load it and compare it with the model; return the sentence of ``compare``.

    Raises:
        TrainingError: torch cannot export the model, or the outputs of program and model differ.
        OSError: The file cannot be written.
    """
    # Not directly to the file: torch's writer does not report a full disk as an OSError.
    content = io.BytesIO()
    torch.export.save(_trace(model), content)
    path.write_bytes(content.getbuffer())
    return model.compare(torch.export.load(path).module(), "torch.export's program")


def write_onnx(path: Path, model: ServedModel) -> str:
    """Write the ONNX file, with a second file for weights of more than 2 GB, and compare it as ``write_program`` does.

    Raises:
        TrainingError: torch cannot export the model, or ONNX Runtime's answers differ from the model's.
        OSError: A file cannot be written.
    """
    for package in ("onnx_ir", "onnxscript"):  # they log each change that they make
        logging.getLogger(package).setLevel(logging.WARNING)
    program = _trace(model)
    axes = {axis: dim.__name__ for axis, dim in _free_axes(model).items()}  # with their names
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about the exporter's code
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
    assert converted is not None  # with dynamo=True
    converted.save(path)
    return model.compare(session_of(path, model), "ONNX Runtime")


def session_of(path: Path, model: ServedModel) -> Callable[..., Tensor]:
    """Return a function that runs the ONNX file with ONNX Runtime on this machine's CPU: inputs -> outputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(*inputs: Tensor) -> Tensor:
        named = {name: tensor.numpy() for name, tensor in zip(model.names, inputs, strict=True)}
        return torch.from_numpy(session.run([model.gives.name], named)[0])

    return run


def transformers_of(folder: Path, model: ServedModel) -> Callable[[Tensor], Tensor]:
    """Return a function that runs the language model in a Hugging Face folder with transformers: tokens -> output."""
    transformers = load_transformers()
    transformers.logging.disable_progress_bar()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)

    def run(tokens: Tensor) -> Tensor:
        logits = loaded(tokens).logits[..., : model.gives.dims[-1]]
        return logits if len(model.gives.dims) > 1 else logits[:, -1]

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
    except UserError as error:
        raise TrainingError(f"model={model.name} cannot be exported in this format: {error}") from error
    except Exception as error:  # of many kinds, depending on the operation that cannot be traced
        raise _not_exported(model, error) from error


def _not_exported(model: ServedModel, error: Exception) -> TrainingError:
    return TrainingError(f"torch cannot export model={model.name}: {brief(error)}")
