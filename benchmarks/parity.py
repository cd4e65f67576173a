"""The promise in numbers: the same tiny GPT-2 under every strategy, compared with ``parallel=single``.

    python -m benchmarks.parity

Runs the real command line, 20 steps of SGD in float32 with dropout, tied embeddings and clipping, on micro-batches of
the same size, and prints the largest relative differences of any step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import table

ROOT = Path(__file__).parents[1]
RECIPE = [
    "model=gpt2", "model.size=tiny", "model.dropout=0.1", "data.seq_len=64", "device=cpu", "optim=sgd", "optim.lr=0.1",
    "optim.momentum=0.9", "scheduler=constant", "train.steps=20", "train.global_batch_size=16", "train.grad_clip=0.5",
    "train.precision=fp32", "train.eval_batches=2", "train.checkpoint_every=null", "logger=none",
]  # fmt: skip
MICROBATCHES = 8
RUNS = [
    ["parallel=single"],
    ["parallel=model_parallel", "parallel.pp=4"],
    ["parallel=ddp", "parallel.dp=2"],
    ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=gpipe"],
    ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=1f1b"],
    ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=interleaved_1f1b"],
    ["parallel=pipelined", "parallel.pp=4", "parallel.schedule=1f1b"],
    ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=gpipe"],
    ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=1f1b"],
    ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=interleaved_1f1b"],
]


def main() -> None:
    rows, reference = [], None
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(RUNS):
            replicas = 2 if "parallel.dp=2" in run else 1
            result = train([*run, f"parallel.chunks={MICROBATCHES // replicas}"], Path(folder) / str(number))
            reference = reference or result
            rows.append(compare(run, result, reference))
            print(" ".join(run), file=sys.stderr)
    print(table.markdown(rows))
    print(f"\nwritten to {table.write('parity', rows, recipe=' '.join(RECIPE))}")


def train(overrides: list[str], run_dir: Path) -> list[dict]:
    """One run of the command line; its metrics.jsonl."""
    command = [sys.executable, "train.py", *RECIPE, *overrides, f"hydra.run.dir={run_dir}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def compare(run: list[str], result: list[dict], reference: list[dict]) -> dict:
    """A row of the table: the largest relative difference over all steps."""

    def difference(key: str) -> str:
        pairs = [(a[key], b[key]) for a, b in zip(result, reference, strict=True) if key in a]
        return f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e}"

    return {
        "run": " ".join(f"`{word}`" for word in run),
        "loss": difference("loss"),
        "gradient norm": difference("grad_norm"),
        "validation loss": difference("val_loss"),
    }


if __name__ == "__main__":
    main()
