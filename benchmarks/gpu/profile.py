"""Where a step of GPT-2 goes, by what the device computes, from a trace of torch.profiler."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from benchmarks.gpt2 import has_compiler
from benchmarks.gpu.breakdown import CATEGORIES, Breakdown
from benchmarks.gpu.gpt2 import OURS, PLAIN, free_memory, random_tokens, tokens_of
from benchmarks.plain import PlainLoop, adamw, same_model, token_loss
from benchmarks.trainer import Trainer, configured
from parallel.devices import synchronize

WINDOW = "profiled steps"
STEPS, WARM_UP = 3, 4
MICROBATCH, CHUNKS = 32, 4


def rows(toy: bool) -> Iterator[dict]:
    """Yield this project's row and the plain loop's, eager and compiled."""
    microbatch, chunks = (2, 2) if toy else (MICROBATCH, CHUNKS)
    compiles = not toy and has_compiler()
    for compiled in (False, True) if compiles else (False,):
        free_memory()
        with random_tokens(toy, microbatch * chunks) as overrides:
            trainer = Trainer(configured([*overrides, f"parallel.chunks={chunks}", f"train.compile={compiled}"]))
        model = same_model(trainer)
        plain = PlainLoop(trainer, token_loss(model), adamw(model), compiled)
        for name, step in ((OURS, trainer.step), (PLAIN, plain.step)):
            steps = 1 if toy else STEPS
            found = _profiled(step, steps, 1 if toy else WARM_UP, trainer.strategy.device)
            yield {
                "run": name,
                "micro-batch": microbatch,
                "compiled": compiled,
                "seconds a step": f"{found.total / steps:.4f}",
                "tokens/s, profiled": f"{microbatch * chunks * tokens_of(toy) * steps / found.total:,.0f}",
                **{category: f"{found.seconds[category] / found.total:.1%}" for category in CATEGORIES},
                "idle": f"{found.idle / found.total:.1%}",
            }


def _profiled(step, steps: int, warm_up: int, device: torch.device) -> Breakdown:
    for number in range(1, warm_up + 1):
        step(number)
    synchronize(device)
    activities = list(supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA})
    with profile(activities=activities) as recorded, record_function(WINDOW):
        for number in range(1, steps + 1):
            step(number)
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return Breakdown.read(path, WINDOW)
