"""What this project adds: around a training step, and before the first one.

    python -m benchmarks.overhead [--rounds 8] [--repeats 5] [--quick]

Loop: GPT-2 124M, 8 x 256 tokens, steps of ``training.loop.Loop`` (prefetch, gradient norm, metrics, progress) against
the same parts' forward, backward and update with nothing around them, in turns in one process.

Start: the real command line, from its start to its first step, by what the run leaves behind at each point; and the
answers that need no training. Each is a process of its own, ``--repeats`` times in turns, after one that is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import table
from benchmarks.timing import Spread, paired, take_turns
from benchmarks.trainer import Trainer, configured
from parallel.devices import keep_freed_memory
from parallel.precision import autocast
from training.checkpoint import Checkpoints
from training.loop import Loop
from training.reporting import MetricsFile, Progress

ROOT = Path(__file__).parents[1]
BARE, LOOP = "bare step", "loop"
ANSWERS = {
    "python -c pass": ["-c", "pass"],
    "python -c 'import torch'": ["-c", "import torch"],
    "train.py --help": ["train.py", "--help"],
    "train.py model=nonsense (no such option)": ["train.py", "model=nonsense"],
    "train.py train.stpes=3 (no such key)": ["train.py", "train.stpes=3"],
    "train.py parallel.chunks=abc (a rule)": ["train.py", "parallel.chunks=abc"],
    "train.py parallel=pipe_ddp train.global_batch_size=10 (a rule across sections)": [
        "train.py", "parallel=pipe_ddp", "train.global_batch_size=10",
    ],
}  # fmt: skip
RUNS = {
    "toy": ["parallel=single"],
    "toy parallel=pipelined (2 processes)": ["parallel=pipelined", "parallel.pp=2"],
    "toy parallel=pipe_ddp (4 processes)": ["parallel=pipe_ddp"],
}
PARTS = ("Python, Hydra, composition", "imports, checks, plan", "processes, building", "first step")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=8, help="steps of the loop, and of the bare step")
    options.add_argument("--repeats", type=int, default=5, help="starts of each command")
    options.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.repeats = 2, 1

    seconds = loop_and_bare("tiny" if chosen.quick else "124M", chosen.rounds)
    rows = [{"run": name, **Spread.of(values).columns()} for name, values in seconds.items()]
    overhead = paired(seconds, BARE, LOOP) - 1
    print(table.markdown(rows))
    print(f"\noverhead of the loop over the bare step: {overhead:+.1%} (median of {chosen.rounds} pairs)\n")
    table.write("overhead_loop", rows, chosen.quick, overhead=round(overhead, 4), threads=torch.get_num_threads())

    rows = starts(chosen.repeats)
    print(table.markdown(rows))
    path = table.write("overhead_start", rows, chosen.quick, repeats=chosen.repeats)
    print(f"\nwritten to {path.parent}")


def loop_and_bare(size: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step of BARE and of LOOP."""
    keep_freed_memory()
    setup = configured(
        [
            "model=gpt2", f"model.size={size}", "parallel=single", "train.global_batch_size=8", "data.seq_len=256",
            "train.grad_clip=null", "train.eval_every=null", "train.checkpoint_every=null", "train.steps=1000000",
            "logger=none",
        ]
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return take_turns({BARE: bare_step(setup), LOOP: whole_loop(setup, Path(folder))}, rounds)


def bare_step(setup) -> Callable[[int], None]:
    """Forward, backward, optimizer step of this project's parts, and nothing around them."""
    trainer = Trainer(setup)
    (stage,) = trainer.strategy.stages
    *body, (_, head) = stage.layers.items()

    def step(number: int) -> None:
        batch = trainer.batch(number)
        trainer.strategy.zero_grad()
        with autocast(setup.plan.precision, setup.plan.device_type):
            x = batch.inputs.to(trainer.strategy.device)
            for _, layer in body:
                x = layer(x)
            targets = batch.targets.to(trainer.strategy.device)
            loss = head.loss(x, targets, None).loss / targets.numel()
            loss.backward()
        trainer.optimizer.step(trainer.optimizer.base_lr)
        loss.item()

    return step


def whole_loop(setup, folder: Path) -> Callable[[int], None]:
    """``training.loop.Loop`` with its records, a step at a time."""
    trainer = Trainer(setup)
    metrics = MetricsFile(folder / "metrics.jsonl")
    progress = Progress(setup.total_steps, tokens=True)
    cfg, mesh = setup.cfg, trainer.strategy.mesh
    checkpoints = Checkpoints(folder / "checkpoints", cfg.train.keep_checkpoints, mesh, cfg.parallel.timeout_s)

    def step(number: int) -> None:
        one = dataclasses.replace(setup, total_steps=number)
        parts = trainer.strategy, trainer.optimizer, checkpoints
        Loop(one, *parts, metrics.write, progress.update, progress.say).run(first_step=number)

    return step


def starts(repeats: int) -> list[dict]:
    """A row for each command: its seconds, the largest of them, and those of its parts (medians)."""
    answers: dict[str, list[float]] = {name: [] for name in ANSWERS}
    runs: dict[str, list[list[float]]] = {name: [] for name in RUNS}
    for turn in range(repeats + 1):
        for name, arguments in ANSWERS.items():
            start = time.time()
            with tempfile.TemporaryDirectory() as folder:
                run_dir = [f"hydra.run.dir={folder}/run"] if arguments[0] == "train.py" else []
                subprocess.run([sys.executable, *arguments, *run_dir], cwd=ROOT, capture_output=True)
            answers[name].append(time.time() - start)
        for name, overrides in RUNS.items():
            runs[name].append(until_first_step(overrides))
        if turn == 0:  # files not in the system's cache yet
            answers, runs = {n: [] for n in answers}, {n: [] for n in runs}
    rows = [
        {"command": name, "seconds": f"{statistics.median(found):.2f}", "slowest": f"{max(found):.2f}"}
        | dict.fromkeys(PARTS, "")
        for name, found in answers.items()
    ]
    for name, found in runs.items():
        totals = [sum(parts) for parts in found]
        parts = [f"{statistics.median(part):.2f}" for part in zip(*found, strict=True)]
        row = {"command": f"{name}, to its first step", "seconds": f"{statistics.median(totals):.2f}"}
        rows.append(row | {"slowest": f"{max(totals):.2f}"} | dict(zip(PARTS, parts, strict=True)))
    return rows


def until_first_step(overrides: list[str]) -> list[float]:
    """Seconds of each of PARTS of one run of one step."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "train.py", *overrides, "train.steps=1", "train.eval_every=null"]
        command += ["train.checkpoint_every=null", f"hydra.run.dir={run_dir}"]
        start = time.time()
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            checked = None
            for line in run.stdout:
                if checked is None and line.startswith("global batch"):  # the plan is printed when all checks are done
                    checked = time.time()
        if run.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed with exit code {run.returncode}")
        # Each file is written once (metrics.jsonl has one line), so its time is that of the event.
        written = [os.path.getmtime(run_dir / name) for name in (".hydra/config.yaml", "environment.json")]
        moments = [start, written[0], checked, written[1], os.path.getmtime(run_dir / "metrics.jsonl")]
    return [after - before for before, after in zip(moments, moments[1:], strict=False)]


if __name__ == "__main__":
    main()
