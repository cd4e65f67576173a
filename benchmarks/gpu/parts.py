"""One NVIDIA GPU, measured in parts of less than ten minutes that each leave their rows as they are measured.

    python -m benchmarks gpu [PART …] [--dry-run] [--output FOLDER]

card            what the GPU is, and the versions
peaks           measured bandwidth of copies, and the fastest products of matrices
gpt2            tokens/s and MFU of GPT-2 124M at 1,024 tokens, by micro-batch size, beside nanoGPT's loop
gpt2_compiled   the same with torch.compile, and the 524,288 tokens a step of experiment=gpt2_524k
profile         where a step of GPT-2 goes: matmul, attention, cross entropy, elementwise, …, idle
resnet50        images/s at 224 pixels, and the published 3 x 120 images of 128 pixels, beside torchvision's model
pipelines       GPT-2 in two and four pipeline ranks on one GPU

Without a PART all run one after the other, each in a process of its own that is ended after ten minutes. A part writes
gpu_PART.csv after every row, and date, card and versions into the JSON file beside it. Nothing is downloaded: tokens
and images are random. --dry-run goes through every part on the CPU at toy size, in a minute or two.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from benchmarks import table
from benchmarks.gpu import card, gpt2, images, pipelines, profile
from parallel.devices import keep_freed_memory

LIMIT_S = 600
PARTS: dict[str, Callable[[bool], Iterable[dict]]] = {
    "card": card.facts,
    "peaks": card.peaks,
    "gpt2": gpt2.eager,
    "gpt2_compiled": gpt2.compiled,
    "profile": profile.rows,
    "resnet50": images.rows,
    "pipelines": pipelines.rows,
}


OPTIONS = {
    **table.QUICK,
    "parts": dict(nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default"),
    "--output": dict(type=Path, help="folder for the tables; benchmarks/results by default"),
}


def main(chosen: Namespace) -> int:
    """Measure the parts that the command line names; returns the exit code."""
    if unknown := [part for part in chosen.parts if part not in PARTS]:
        raise SystemExit(f"error: {unknown[0]} is not one of the parts: {', '.join(PARTS)}")
    if not chosen.quick and not torch.cuda.is_available():
        raise SystemExit(
            "error: this machine has no GPU that torch can use; --dry-run goes through every part on the CPU"
        )
    folder = chosen.output or table.folder_of(chosen.quick)
    parts = chosen.parts or list(PARTS)
    if chosen.quick or len(parts) == 1:
        for part in parts:
            measure(part, chosen.quick, folder)
        return 0
    failed = [part for part in parts if not _in_own_process(part, folder)]
    if failed:
        print(f"error: parts that failed: {', '.join(failed)}; their rows so far are in {folder}", file=sys.stderr)
    return 1 if failed else 0


def measure(part: str, toy: bool, folder: Path) -> None:
    """Print and writes the rows of a part, each as soon as it is there."""
    keep_freed_memory()
    path, rows = folder / f"gpu_{part}.csv", []
    about = {"part": part, "cuda": torch.version.cuda, "dry run, whose numbers mean nothing": toy}
    for row in PARTS[part](toy):
        rows.append(row)
        table.save(path, rows, **about)
        print(f"{part}: {', '.join(f'{key} {value}' for key, value in row.items() if value != '')}", flush=True)
    print(f"\n{table.markdown(rows)}\nwritten to {path}\n", flush=True)


def _in_own_process(part: str, folder: Path) -> bool:
    """Return whether the part was measured to its end."""
    command = [sys.executable, "-m", "benchmarks", "gpu", part, "--output", str(folder)]
    try:
        return subprocess.run(command, timeout=LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"error: {part} took longer than {LIMIT_S} s and was ended", file=sys.stderr)
        return False
