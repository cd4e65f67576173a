"""What a checkpoint of GPT-2 costs a run: seconds that training waits for a save, and those of a resume.

    python -m benchmarks checkpoint [--rounds 3] [--quick]

GPT-2 124M with AdamW in fp32 on the CPU, two samples of 256 tokens a step, one process. A round trains three steps,
saves in the background, trains the step during which the files are written, saves once more and waits, and resumes.
Beside them, it reads the bytes of the same files into new memory. Files come from the system's cache.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.table import Benchmark, Table
from benchmarks.trainer import Trainer, configured
from training.checkpoint.files import Checkpoint
from training.checkpoint.load import load_chosen
from training.checkpoint.save import Checkpointer

STEP, WAIT, NEXT, WHOLE = "a step", "wait for a save in the background", "the step after it", "a save, awaited"
READ, CHECKED, RESUME = "read the files into new memory", "compute their checksums", "compute checksums and load"


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table: medians of the rounds, and the first save, which also takes the memory of the copies."""
    size = ("model.size=tiny",) if chosen.quick else ()
    data = ("data=stdlib", "train.global_batch_size=2", "train.grad_clip=null")
    trainer = Trainer(configured(["model=gpt2", *size, *data, "parallel=single"]))
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        seconds.setdefault(name, []).append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        saves = Checkpointer(Path(folder), trainer.strategy, trainer.optimizer, keep=1)

        def step() -> None:
            batch = trainer.batch(number)
            trainer.strategy.train_step(batch, number)
            saves.wait_copied()
            trainer.optimizer.step(trainer.optimizer.base_lr)

        number = 0
        for _ in range(chosen.rounds):
            for _ in range(3):
                number += 1
                timed(STEP, step)
            timed(WAIT, partial(saves.save, number, {}))
            number += 1
            timed(NEXT, step)
            saves.wait_pending()
            timed(WHOLE, partial(saves.save, number, {}, wait=True))
            newest = Checkpoint.newest(Path(folder))
            assert newest is not None
            timed(READ, partial(read, newest))
            timed(CHECKED, partial(Checkpoint, newest.folder, verify=True))
            choose = partial(Checkpoint.newest, Path(folder), verify=True)
            timed(RESUME, partial(load_chosen, choose, trainer.strategy, trainer.optimizer))
        size_of_all = sum(size for size, _ in newest.files.values())
    seconds[STEP] = seconds[STEP][1:]
    rows = [
        {"what": name, "seconds (median)": f"{statistics.median(of):.2f}", "first": f"{of[0]:.2f}"}
        for name, of in seconds.items()
    ]
    yield Table("checkpoint", rows, {"MB": size_of_all // 10**6, "threads": torch.get_num_threads()})


def read(checkpoint: Checkpoint) -> list[torch.Tensor]:
    """Read the tensor files of a checkpoint as bytes."""
    contents = []
    for name, (size, _) in checkpoint.files.items():
        content = torch.empty(size, dtype=torch.uint8)
        view, place = memoryview(content.numpy()), 0  # pyright: ignore[reportArgumentType]
        with open(checkpoint.folder / name, "rb", buffering=0) as file:
            while count := file.readinto(view[place:]):
                place += count
        contents.append(content)
    return contents


BENCHMARK = Benchmark(measure, rounds=3)
