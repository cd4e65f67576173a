"""A new interpreter, as a user starts one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(*words: object, cwd: Path = ROOT, timeout: float = 250, **env: str | None) -> subprocess.CompletedProcess:
    """Run ``python words`` in a folder, with further variables of the environment, or without those that are None."""
    variables = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout)
