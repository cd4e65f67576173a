"""One training step of GPT-2 124M on this machine: a plain float32 loop, a bare bf16 step, and this project's loop.

    python -m benchmarks.gpt2_step [--rounds 5] [--batch 8] [--tokens 256]

All three run the same model on the same batches, interleaved in one process, so that a noisy machine is noisy for all.

plain fp32   what a tutorial writes: logits, F.cross_entropy, loss.backward(), torch.optim.AdamW as it comes
bare bf16    forward, backward and optimizer step of this project's parts, and nothing around them
loop bf16    ``python train.py parallel=single model=gpt2``: the same with prefetch, gradient norm, metrics and progress
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir

from benchmarks import table
from conf.schema import register
from data.loader import TrainBatches
from parallel.build import build_strategy
from parallel.devices import keep_freed_memory
from parallel.precision import autocast
from parallel.strategy import Options
from training.checkpoint import Checkpoints
from training.config import attributes, plain
from training.loop import Loop
from training.optimizer import Optimizer
from training.records import MetricsFile, Progress
from training.setup import Setup, prepare

STEPS_A_ROUND = 2


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--batch", type=int, default=8, help="sequences a step")
    options.add_argument("--tokens", type=int, default=256, help="tokens a sequence")
    options.add_argument("--size", default="124M", help="model.size")
    chosen = options.parse_args()

    keep_freed_memory()
    setup = configured(chosen)
    batches = TrainBatches(setup.data.train, chosen.batch, seed=1337)
    with tempfile.TemporaryDirectory() as folder:
        contenders = {
            "plain fp32": plain_loop(setup, batches),
            "bare bf16": bare_step(setup, batches),
            "loop bf16": whole_loop(setup, Path(folder)),
        }
        times = measure(contenders, chosen.rounds)
    report(times, chosen)


def configured(chosen) -> Setup:
    """The main job's configuration, one process, at the sizes asked for."""
    register()
    overrides = [
        "model=gpt2", f"model.size={chosen.size}", f"train.global_batch_size={chosen.batch}",
        f"data.seq_len={chosen.tokens}", "train.precision=bf16", "train.grad_clip=null", "train.eval_every=null",
        "train.checkpoint_every=null", "train.steps=1000000",
    ]  # fmt: skip
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        return prepare(attributes(plain(compose("train", overrides))))


def plain_loop(setup: Setup, batches: TrainBatches) -> Callable[[int], None]:
    """The textbook version, in float32."""
    model = setup.chain.build(setup.chain.names, 1337, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def step(number: int) -> None:
        batch = batches[number]
        loss = F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def bare_step(setup: Setup, batches: TrainBatches) -> Callable[[int], None]:
    """This project's model, loss and optimizer with nothing around them."""
    model = setup.chain.build(setup.chain.names, 1337, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    *body, (_, head) = model.items()

    def step(number: int) -> None:
        batch = batches[number]
        optimizer.zero_grad()
        with autocast("bf16", "cpu"):
            x = batch.inputs
            for _, layer in body:
                x = layer(x)
            loss = head.loss(x, batch.targets, None).loss / batch.targets.numel()
            loss.backward()
        optimizer.step()
        loss.item()

    return step


def whole_loop(setup: Setup, folder: Path) -> Callable[[int], None]:
    """training.loop.Loop with its records, on one process."""
    mesh = setup.plan.mesh(0)
    strategy = build_strategy(setup.plan, setup.chain, mesh, Options(seed=1337), setup.sample)
    metrics = MetricsFile(folder / "metrics.jsonl")
    progress = Progress(1_000_000, tokens=True)
    optimizer = Optimizer(plain(setup.cfg.optim), strategy)

    def step(number: int) -> None:
        one = dataclasses.replace(setup, total_steps=number)
        loop = Loop(one, strategy, optimizer, Checkpoints(folder), metrics.write, progress.update, progress.say)
        loop.run(first_step=number)

    return step


def measure(contenders: dict[str, Callable[[int], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, taken in turns; a first round of each is left out."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    number = 0
    for turn in range(rounds + 1):
        for _ in range(STEPS_A_ROUND):
            number += 1
            for name, step in contenders.items():
                start = time.perf_counter()
                step(number)
                if turn > 0:
                    times[name].append(time.perf_counter() - start)
    return times


def report(times: dict[str, list[float]], chosen) -> None:
    """Print the table and write it to results."""
    tokens = chosen.batch * chosen.tokens
    middle = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        {
            "run": name,
            "seconds a step (median)": f"{middle[name]:.3f}",
            "fastest": f"{min(values):.3f}",
            "slowest": f"{max(values):.3f}",
            "tokens/s": f"{tokens / middle[name]:.0f}",
            "times plain fp32": f"{middle['plain fp32'] / middle[name]:.2f}",
        }
        for name, values in times.items()
    ]
    # Paired: each step of the loop against the bare step beside it, which had the same batch and the same noise.
    overhead = statistics.median(
        loop / bare - 1 for loop, bare in zip(times["loop bf16"], times["bare bf16"], strict=True)
    )
    print(table.markdown(rows))
    print(f"\noverhead of the loop over the bare step: {overhead:+.1%} (median of {len(times['loop bf16'])} pairs)")
    path = table.write(
        "gpt2_step", rows, model=f"GPT-2 {chosen.size}", batch=f"{chosen.batch} x {chosen.tokens} tokens",
        threads=torch.get_num_threads(), loop_overhead=round(overhead, 4),
    )  # fmt: skip
    print(f"written to {path}")


if __name__ == "__main__":
    main()
