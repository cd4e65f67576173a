"""What this project adds: around a training step, and before the first one.

    python -m benchmarks overhead [--rounds 8] [--quick]

Loop: GPT-2 124M, 8 x 256 tokens, steps of ``training.run.loop.Loop`` (prefetch, gradient norm, metrics, progress)
against the same forward, backward and update with nothing around them, in turns in one process.

Start: the real command line, from its start to its first step, by the times of the files that the run writes; and
commands that train nothing. Each is a process of its own, five times in turns, after one that is left out.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.command_line import ROOT, run
from benchmarks.table import Benchmark, Table
from benchmarks.timing import paired, tabulate, take_turns
from benchmarks.trainer import Trainer, configured
from parallel.devices import autocast, keep_freed_memory
from training.checkpoint.save import Checkpointer
from training.reporting.loggers import Loggers
from training.reporting.recorder import Recorder
from training.run.loop import Loop
from training.run.setup import Setup

BARE, LOOP = "bare step", "loop"
SIZE = ("model.size=124M", "train.global_batch_size=8", "data.seq_len=256")
TINY = ("model.size=tiny", "train.global_batch_size=2", "data.seq_len=16")
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
STARTS = 5  # of each command


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of the loop, then that of the start."""
    seconds = loop_and_bare(TINY if chosen.quick else SIZE, chosen.rounds)
    overhead = paired(seconds, BARE, LOOP) - 1
    print(f"overhead of the loop over the bare step: {overhead:+.1%} (median of {chosen.rounds} pairs)\n")
    about = {"overhead": round(overhead, 4), "threads": torch.get_num_threads()}
    yield Table("overhead_loop", tabulate(seconds), about)
    repeats = min(chosen.rounds, STARTS)
    yield Table("overhead_start", starts(repeats), {"repeats": repeats})


def loop_and_bare(size: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step of BARE and of LOOP."""
    keep_freed_memory()
    setup = configured(
        [
            "model=gpt2", *size, "parallel=single", "train.grad_clip=null", "train.eval_every=null",
            "train.checkpoint_every=null", "train.steps=1000000", "logger=none",
        ]
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return take_turns({BARE: bare_step(setup), LOOP: whole_loop(setup, Path(folder))}, rounds)


def bare_step(setup: Setup) -> Callable[[int], None]:
    """Return a step of forward, backward and update, and nothing around them."""
    trainer = Trainer(setup)
    (stage,) = trainer.strategy.stages
    *body, (_, head) = stage.layers.items()

    def step(number: int) -> None:
        batch = trainer.batch(number)
        trainer.strategy.gradients.clear()
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


def whole_loop(setup: Setup, folder: Path) -> Callable[[int], None]:
    """Return a step that is one of ``training.run.loop.Loop``, which writes its records into ``folder``."""
    trainer = Trainer(setup)
    recorder = Recorder(folder, Loggers({}, build=None), setup.total_steps)
    checkpoints = Checkpointer(folder / "checkpoints", trainer.strategy, trainer.optimizer)

    def step(number: int) -> None:
        one = dataclasses.replace(setup)
        one.total_steps = number
        Loop(one, trainer.strategy, trainer.optimizer, checkpoints, recorder).run(first_step=number)

    return step


def starts(repeats: int) -> list[dict]:
    """Return a row per command: median and largest of its seconds, and the medians of the parts of a run."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in (*ANSWERS, *RUNS)}
    for turn in range(repeats + 1):
        for name in seconds:
            measured = until_answer(ANSWERS[name]) if name in ANSWERS else until_first_step(RUNS[name])
            if turn > 0:  # in the first, files are not in the system's cache yet
                seconds[name].append(measured)
    rows = []
    for name, repetitions in seconds.items():
        totals = [sum(parts) for parts in repetitions]
        row = {"command": name if name in ANSWERS else f"{name}, to its first step"}
        row |= {"seconds": f"{statistics.median(totals):.2f}", "slowest": f"{max(totals):.2f}"}
        medians = [f"{statistics.median(part):.2f}" for part in zip(*repetitions, strict=True)]
        rows.append(row | dict(zip(PARTS, medians if name in RUNS else [""] * len(PARTS), strict=True)))
    return rows


def until_answer(arguments: list[str]) -> list[float]:
    """Return the seconds of a command that trains nothing, in a list of one."""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = [f"hydra.run.dir={folder}/run"] if arguments[0] == "train.py" else []
        subprocess.run([sys.executable, *arguments, *run_dir], cwd=ROOT, capture_output=True)
    return [time.time() - start]


def until_first_step(overrides: list[str]) -> list[float]:
    """Return the seconds of each of PARTS, of a run of one step."""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        once = ("train.steps=1", "train.eval_every=null", "train.checkpoint_every=null")
        lines = run(*overrides, *once, f"hydra.run.dir={run_dir}")
        # printed with the plan, after all checks
        checked = next(moment for moment, line in lines if line.startswith("global batch"))
        # Each file is written once (metrics.jsonl has one line), so its time is the event's.
        written = [os.path.getmtime(run_dir / name) for name in (".hydra/config.yaml", "environment.json")]
        moments = [start, written[0], checked, written[1], os.path.getmtime(run_dir / "metrics.jsonl")]
    return [after - before for before, after in zip(moments, moments[1:], strict=False)]


BENCHMARK = Benchmark(measure, rounds=8)
