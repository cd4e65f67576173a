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
from string import Template

from safetensors.torch import save_file

from training.export.program import ONNX, write_onnx
from training.export.served import LABELS, ServedModel, TensorInfo, write_texts

EXAMPLE = "example.safetensors"
_EXAMPLES = 2
_QUEUE_DELAY_US = 1000  # how long a request waits for others to be computed with

_CONFIG = Template("""\
name: "$name"
backend: "onnxruntime"
max_batch_size: $max_batch_size
input [
$takes
]
output [
$gives
]
instance_group [
  {
    count: 1
    kind: $kind
  }
]
dynamic_batching {
  max_queue_delay_microseconds: $delay
}
""")

_README = Template("""\
# $name for Triton Inference Server

Start the server, with this folder as its model repository:

    docker run --rm -p 8000:8000 -p 8001:8001 -p 8002:8002 -v "$$PWD":/models \\
        nvcr.io/nvidia/tritonserver:25.06-py3 tritonserver --model-repository=/models

(with `--gpus=all` on a machine with GPUs), and ask it:

    curl localhost:8000/v2/health/ready
    curl localhost:8000/v2/models/$name

$takes The output is `$gives`, $gives_what.
$more

`$name/$example` holds $examples samples and what the model answered. In the project that has written this folder,

    python -m training.export.serve_check FOLDER

sends them to the server by HTTP and by gRPC and compares.
""")

_TOKENIZER = """
Text becomes tokens before the request, and tokens text after it, in the client: `$name/tokenizer.json` is GPT-2's
tokenizer for the packages `tokenizers` and `transformers`,

    tokens = tokenizers.Tokenizer.from_file("$name/tokenizer.json").encode("def main").ids

and the next token is drawn from the last row of the logits."""

_WORDS = """
Words become tokens before the request, in the client: `$name/vocabulary.txt` lists them, and a word's token is the
number of its line, from 0 on; a word that is not listed is token 0. Text is lower case, with its signs of punctuation
as words of their own. The next word is drawn from the last row of the logits."""


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
    (folder / "README.md").write_text(_readme(model, len(inputs[0])), encoding="utf-8")
    return said


def config(model: ServedModel, max_batch_size: int, kind: str) -> str:
    """The content of config.pbtxt."""
    label = f'    label_filename: "{LABELS}"\n' if LABELS in model.texts else ""
    return _CONFIG.substitute(
        name=model.name,
        max_batch_size=max_batch_size,
        takes=",\n".join(map(_tensor, model.takes)),
        gives=_tensor(model.gives, label),
        kind=kind,
        delay=_QUEUE_DELAY_US,
    )


def _tensor(info: TensorInfo, more: str = "") -> str:
    dims = ", ".join(map(str, info.dims or (1,)))
    lines = f'    name: "{info.name}"\n    data_type: TYPE_{_kind(info)}\n    dims: [ {dims} ]\n'
    lines += "" if info.dims else "    reshape: { shape: [ ] }\n"
    return f"  {{\n{lines}{more}  }}"


def _readme(model: ServedModel, examples: int) -> str:
    more = model.preparation
    if model.takes_tokens:
        part = _TOKENIZER if "tokenizer.json" in model.texts else _WORDS if "vocabulary.txt" in model.texts else ""
        more = Template(part).substitute(name=model.name)
        more += f"\nTokens are from 0 to {model.gives.dims[-1] - 1}; a request with another one is refused on a CPU."
        more += f"\nA text has at most {model.positions} tokens." if model.positions else ""
    elif LABELS in model.texts:
        more += f"\nA request for the output's best classes gets their names from `{model.name}/{LABELS}`."
    takes = [f"`{info.name}`, {_describe(info)}" for info in model.takes]
    return _README.substitute(
        name=model.name,
        takes=f"The input{'s are' if len(model.takes) > 1 else ' is'} {' and '.join(takes)}.",
        gives=model.gives.name,
        gives_what=_describe(model.gives),
        more=more.strip("\n"),
        example=EXAMPLE,
        examples=examples,
    )


def _describe(info: TensorInfo) -> str:
    dims = ["batch", *("tokens" if n < 0 else str(n) for n in info.dims or (1,))]
    return f"{_kind(info)} [{', '.join(dims)}]"


def _kind(info: TensorInfo) -> str:
    """Return Triton's name of a dtype: FP32, INT64, BOOL."""
    return str(info.dtype).removeprefix("torch.").upper().replace("FLOAT", "FP")
