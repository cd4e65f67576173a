"""Asks a running Triton server for a batch by HTTP and by gRPC, and compares with what torch has answered.

    python -m training.export.serve_check FOLDER [--http localhost:8000] [--grpc localhost:8001]

FOLDER is a repository that ``mode=export export.format=triton`` has written. It holds an example: inputs, and the
outputs that the model gave in torch. Needs tritonclient (requirements-serving.txt), neither torch nor a checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from common.errors import TrainingError

TOLERANCE = 1e-5  # relative to the largest output, or absolute below 1
_TIMEOUT_S = 30.0
_TYPES = {
    "float32": "FP32", "float64": "FP64", "float16": "FP16", "int64": "INT64", "int32": "INT32", "int16": "INT16",
    "int8": "INT8", "uint8": "UINT8", "bool": "BOOL",
}  # fmt: skip


class Example(NamedTuple):
    """What a repository holds of its model.

    Attributes:
        model: The model's name.
        inputs: A batch of each input, by name.
        output: The output's name.
        outputs: What torch gave for it.
    """

    model: str
    inputs: dict[str, np.ndarray]
    output: str
    outputs: np.ndarray


def main() -> int:
    """Check each protocol; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model repository")
    parser.add_argument("--http", default="localhost:8000", metavar="HOST:PORT")
    parser.add_argument("--grpc", default="localhost:8001", metavar="HOST:PORT")
    chosen = parser.parse_args()
    try:
        example = read_example(chosen.folder)
        for protocol, address in (("http", chosen.http), ("grpc", chosen.grpc)):
            start = time.perf_counter()
            difference = check(protocol, address, example)
            seconds = time.perf_counter() - start
            print(
                f"{protocol} {address}: {example.model} answers; largest difference {difference:.1e}, {seconds:.3f} s"
            )
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read_example(folder: Path) -> Example:
    """Read the example of the repository's model.

    Raises:
        TrainingError: Where there is none.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    found = sorted(folder.glob("*/example.safetensors"))
    if len(found) != 1:
        raise TrainingError(
            f"{folder} is no model repository of mode=export export.format=triton: it holds {len(found)} folders with "
            "an example.safetensors, expected 1"
        )
    try:
        tensors = load_file(found[0])
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"{found[0]} cannot be read: {error}") from error
    gives = {"logits", "outputs"} & tensors.keys()
    if len(gives) != 1 or len(tensors) < 2:
        raise TrainingError(f"{found[0]} holds {', '.join(tensors)}, expected inputs and an output; export it again")
    (output,) = gives
    outputs = tensors.pop(output)
    return Example(found[0].parent.name, tensors, output, outputs)


def check(protocol: str, address: str, example: Example) -> float:
    """Ask the server for the example.

    Args:
        protocol: http or grpc.
        address: HOST:PORT.
        example: What to ask for.

    Returns:
        The largest difference.

    Raises:
        TrainingError: Where the server does not answer, is not ready, refuses, or gives something else.
    """
    client = _client(protocol)
    try:
        given = ask(client, address, example.model, example.inputs, example.output)
    except Exception as error:  # those of two protocols, their transports and the server
        raise TrainingError(f"{protocol} {address}: {example.model}: {str(error) or repr(error)}") from error
    if given.shape != example.outputs.shape:
        raise TrainingError(
            f"{protocol} {address}: {example.model} gives {list(given.shape)}, torch {list(example.outputs.shape)}"
        )
    difference = float(np.abs(given - example.outputs).max())
    largest = float(np.abs(example.outputs).max())
    if not difference <= TOLERANCE * max(1.0, largest):
        raise TrainingError(
            f"{protocol} {address}: {example.model} differs from torch by {difference:.2g}, more than {TOLERANCE:g} of "
            f"the largest output, {largest:.3g}: is the folder the server's repository?"
        )
    return difference


def ask(client: ModuleType, address: str, model: str, inputs: dict[str, np.ndarray], output: str) -> np.ndarray:
    """Return one output of a running server.

    Args:
        client: ``tritonclient.http`` or ``tritonclient.grpc``.
        address: HOST:PORT.
        model: The model's name.
        inputs: Its inputs by name.
        output: The output's name.
    """
    http = client.__name__.endswith("http")
    limits: dict[str, Any] = {"connection_timeout": _TIMEOUT_S, "network_timeout": _TIMEOUT_S} if http else {}
    limit: dict[str, Any] = {} if http else {"client_timeout": _TIMEOUT_S}
    with client.InferenceServerClient(address, **limits) as server:
        if not server.is_model_ready(model, **limit):
            raise ConnectionError("the server does not have it ready")
        tensors = []
        for name, array in inputs.items():
            tensor = client.InferInput(name, list(array.shape), _TYPES[str(array.dtype)])
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        wanted = [client.InferRequestedOutput(output)]
        return server.infer(model, tensors, outputs=wanted, **limit).as_numpy(output)


def _client(protocol: str) -> ModuleType:
    try:
        if protocol == "http":
            import tritonclient.http as client
        else:
            import tritonclient.grpc as client
    except ImportError as error:
        raise TrainingError(
            f"tritonclient is not installed here ({error}): pip install -r requirements-serving.txt"
        ) from error
    return client


if __name__ == "__main__":
    raise SystemExit(main())
