"""The kernels for GPUs, run by Triton's interpreter on the CPU."""

import importlib
import os
from types import ModuleType

import pytest


def interpreted(name: str) -> ModuleType:
    """A module of ``models`` that has kernels; skips the test where Triton does not interpret them."""
    pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for GPUs")
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("there is a GPU, on which pytest -m gpu runs the kernels themselves")
    return importlib.import_module(f"models.{name}")
