"""Cleaning up that happens however this process ends, by SIGKILL too."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def afterwards(script: str) -> Iterator[None]:
    """Run the shell's ``script`` at the end of the block, or of this process if that comes first."""
    # The shell waits for the end of its input, which only this process holds open.
    shell = subprocess.Popen(
        ["sh", "-c", f"cat; {script}"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        shell.stdin.close()
        shell.wait(60)
