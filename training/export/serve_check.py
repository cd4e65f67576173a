"""Asks a running Triton server for a batch by HTTP and by gRPC, and compares with what torch has answered.

    python -m training.export.serve_check FOLDER [--http localhost:8000] [--grpc localhost:8001]

FOLDER is a repository that ``mode=export export.format=triton`` has written. It holds an example: inputs, and the
outputs that the model gave in torch. Needs tritonclient (requirements-serving.txt), neither torch nor a checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

import numpy as np

from common.errors import TrainingError

TOLERANCE = 1e-5  # relative to the largest output, or absolute below 1
_TIMEOUT_S = 30.0


def main() -> int:
    """Check each protocol; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model repository")
    parser.add_argument("--http", default="localhost:8000", metavar="HOST:PORT")
    parser.add_argument("--grpc", default="localhost:8001", metavar="HOST:PORT")
    chosen = parser.parse_args()
    try:
        model, inputs, outputs = read_example(chosen.folder)
        for protocol, address in (("http", chosen.http), ("grpc", chosen.grpc)):
            start = time.perf_counter()
            difference = check(protocol, address, model, inputs, outputs)
            said = f"{model} answers; largest difference {difference:.1e}"
            print(f"{protocol} {address}: {said}, {time.perf_counter() - start:.3f} s")
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def read_example(folder: Path) -> tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the name of the repository's model, its example's inputs by name, and what torch gave: one output."""
    from safetensors.numpy import load_file

    found = sorted(folder.glob("*/example.safetensors"))
    if len(found) != 1:
        raise TrainingError(
            f"{folder} is no model repository of mode=export export.format=triton: it holds {len(found)} folders with "
            "an example.safetensors, expected 1"
        )
    inputs = load_file(found[0])
    outputs = {name: inputs.pop(name) for name in ("logits", "outputs") if name in inputs}
    return found[0].parent.name, inputs, outputs


def check(
    protocol: str, address: str, model: str, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]
) -> float:
    """Ask the server at HOST:PORT for the example, by http or grpc, and return the largest difference.

    Raises:
        TrainingError: The server does not answer, is not ready, refuses, or gives something else.
    """
    ((output, wanted),) = outputs.items()
    try:
        given = ask(protocol, address, model, inputs, output)
        difference, largest = float(np.abs(given - wanted).max()), float(np.abs(wanted).max())
    except ImportError as error:
        way_out = "pip install -r requirements-serving.txt"
        raise TrainingError(f"tritonclient is not installed here ({error}): {way_out}") from error
    except Exception as error:  # those of two protocols, their transports and the server
        raise TrainingError(f"{protocol} {address}: {model}: {str(error) or repr(error)}") from error
    if not difference <= TOLERANCE * max(1.0, largest):
        raise TrainingError(
            f"{protocol} {address}: {model} differs from torch by {difference:.2g}, more than {TOLERANCE:g} of "
            f"the largest output, {largest:.3g}: is the folder the server's repository?"
        )
    return difference


def ask(protocol: str, address: str, model: str, inputs: dict[str, np.ndarray], output: str) -> np.ndarray:
    """Return one output of a running server."""
    client, types = importlib.import_module(f"tritonclient.{protocol}"), importlib.import_module("tritonclient.utils")
    is_http = protocol == "http"
    limits = {"connection_timeout": _TIMEOUT_S, "network_timeout": _TIMEOUT_S} if is_http else {}
    limit = {} if is_http else {"client_timeout": _TIMEOUT_S}
    with client.InferenceServerClient(address, **limits) as server:
        if not server.is_model_ready(model, **limit):
            raise ConnectionError("the server does not have it ready")
        tensors = []
        for name, array in inputs.items():
            tensors.append(client.InferInput(name, list(array.shape), types.np_to_triton_dtype(array.dtype)))
            tensors[-1].set_data_from_numpy(array)
        wanted = [client.InferRequestedOutput(output)]
        return server.infer(model, tensors, outputs=wanted, **limit).as_numpy(output)


if __name__ == "__main__":
    raise SystemExit(main())
