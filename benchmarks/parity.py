"""The promise in numbers: six models under five strategies, each compared with its own ``parallel=single``.

    python -m benchmarks.parity            measures (39 runs of the command line), writes results/parity.csv
    python -m benchmarks.readme            puts what it found into the README

Runs the real command line, with SGD on micro-batches of the same size, and takes the largest relative difference of
any step. The language models train with dropout and clipping, and GPT-2 under every schedule too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import table

ROOT = Path(__file__).parents[1]
MICROBATCHES = 4
COMMON = [
    "device=cpu", "optim=sgd", "optim.momentum=0.9", "scheduler=constant", "train.epochs=null", "train.steps=20",
    "train.global_batch_size=16", "train.precision=fp32", "train.eval_every=10", "train.eval_batches=2",
    "train.checkpoint_every=null", "logger=none", "parallel.threads=1",
]  # fmt: skip
MODELS = {
    "toy": ["optim.lr=0.02"],
    # Chaotic: in its 20th step even float64 shows no more than that it was the same training for a while.
    "resnet50": [
        "data.image_size=64", "data.samples=160", "optim.lr=1e-3", "optim.momentum=0", "train.precision=fp64",
        "train.steps=5", "train.eval_batches=1",
    ],
    "transformer": [
        "model.d_model=32", "model.d_hid=64", "model.n_head=2", "model.n_layer=3", "data.seq_len=32", "optim.lr=0.2",
        "train.grad_clip=0.5",
    ],
    "gpt2": ["model.size=tiny", "model.dropout=0.1", "data.seq_len=64", "optim.lr=0.1", "train.grad_clip=0.5"],
    # Seven plain layers learn nothing from 20 different batches; from one, 20 times, they do.
    "classifier": ["model.image_size=16", "optim.lr=0.2", "train.overfit=true"],
    "convnet": ["model.image_size=12", "optim.lr=0.02"],
}  # fmt: skip
LAYOUTS = [
    ["parallel=model_parallel", "parallel.pp=2"],
    ["parallel=ddp", "parallel.dp=2"],
    ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=1f1b"],
    ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=1f1b"],
]
MORE_LAYOUTS = {
    "gpt2": [
        ["parallel=model_parallel", "parallel.pp=4"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=gpipe"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=interleaved_1f1b"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=looped_bfs"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=interleaved_zero_bubble"],
        ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=planned"],
        ["parallel=pipelined", "parallel.pp=4", "parallel.schedule=1f1b"],
        ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=gpipe"],
        ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.schedule=interleaved_1f1b"],
    ]
}


def main() -> None:
    rows = []
    for model, recipe in MODELS.items():
        settings = dict(word.split("=") for word in (*COMMON, f"model={model}", *recipe))
        words = [f"{key}={value}" for key, value in settings.items()]
        reference = None
        for layout in [["parallel=single"], *LAYOUTS, *MORE_LAYOUTS.get(model, [])]:
            replicas = 2 if "parallel.dp=2" in layout else 1
            result = train([*words, *layout, f"parallel.chunks={MICROBATCHES // replicas}"])
            reference = reference or result
            about = {"model": model, "precision": settings["train.precision"], "run": " ".join(layout)}
            rows.append(about | compare(result, reference))
            print(*rows[-1].values(), file=sys.stderr)
    print(table.markdown(rows))
    recipes = {model: " ".join(recipe) for model, recipe in MODELS.items()}
    path = table.write("parity", rows, microbatches=MICROBATCHES, every_model=" ".join(COMMON), **recipes)
    print(f"\nwritten to {path}")


def train(overrides: list[str]) -> list[dict]:
    """One run of the command line; its metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *overrides, f"hydra.run.dir={folder}/run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]


def compare(result: list[dict], reference: list[dict]) -> dict:
    """How the training went, and the largest relative differences from ``reference`` over all steps."""
    losses = [record["loss"] for record in result if "loss" in record]

    def difference(key: str) -> str:
        pairs = [(a[key], b[key]) for a, b in zip(result, reference, strict=True) if key in a]
        return f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e}"

    return {
        "steps": len(losses),
        "first loss": f"{losses[0]:.3f}",
        "last loss": f"{losses[-1]:.3f}",
        "loss": difference("loss"),
        "gradient norm": difference("grad_norm"),
        "validation loss": difference("val_loss"),
    }


if __name__ == "__main__":
    main()
