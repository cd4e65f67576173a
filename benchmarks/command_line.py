"""train.py as its users start it: a process of its own, with what it prints and what it writes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*overrides: str, echo: bool = False) -> list[tuple[float, str]]:
    """Run train.py and return the lines that it prints, each with its time; ``echo`` shows them on standard error.

    Raises:
        SystemExit: If the run fails.
    """
    command = [sys.executable, "-u", "train.py", *overrides]
    lines = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout:
            lines.append((time.time(), line.rstrip()))
            if echo:
                print(line, end="", file=sys.stderr)
    if process.returncode != 0:
        said = "" if echo else "\n" + "\n".join(line for _, line in lines)
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}{said}")
    return lines


@contextmanager
def run_directory(*overrides: str) -> Iterator[Path]:
    """Run train.py and yield the run's directory, which is deleted afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        run(*overrides, f"hydra.run.dir={folder}/run")
        yield Path(folder, "run")
