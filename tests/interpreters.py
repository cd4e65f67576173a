"""A new interpreter, as a user starts one, and a real kernel for a notebook."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(*words: object, cwd: Path = ROOT, timeout: float = 250, **env: str | None) -> subprocess.CompletedProcess:
    """Run ``python words`` in a folder, with further variables of the environment, or without those that are None."""
    variables = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout)


def run_notebook(notebook, folder: Path, timeout: float, **env: str | None) -> list[list]:
    """The outputs of each cell of code; ``notebook`` makes one by nbformat, or reads it."""
    missing = "needs nbclient and ipykernel: pip install nbclient ipykernel"
    nbformat, nbclient, _ = (
        pytest.importorskip(name, reason=missing) for name in ("nbformat", "nbclient", "ipykernel")
    )
    made = notebook(nbformat)
    # A kernel that sees pytest's own variable leaves the output of its processes alone.
    own = {**os.environ, "PYTEST_CURRENT_TEST": None, "PYDEVD_DISABLE_FILE_VALIDATION": "1", **env}
    client = nbclient.NotebookClient(made, timeout=timeout, resources={"metadata": {"path": str(folder)}})
    client.execute(env={name: value for name, value in own.items() if value is not None})
    return [cell.outputs for cell in made.cells if cell.cell_type == "code"]


def text_of(outputs: list) -> str:
    """What a cell printed."""
    return "".join(output.get("text", "") for output in outputs)
