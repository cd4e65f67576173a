"""Two replicas against one, one core (or GPU) and one thread each, and the cost of the gradients' exchange.

    python -m benchmarks ddp [--rounds 7] [--quick]

A small Transformer with the same batch per replica in every run; all runs take turns in the same two processes:

1 replica               rank 0 alone while the other core is idle
2 processes apart       both at the same time, without communication: the cost of sharing the machine's memory
2 replicas              DistributedDataParallel, for each bucket size, and with gradients sent as bf16

``all-reduce`` is exposed communication, as a fraction of the step: the time that ``2 processes apart`` does not need.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import figure, ranks
from benchmarks.table import Benchmark, Table
from benchmarks.timing import Spread, paired, tabulate, take_turns
from benchmarks.trainer import TRANSFORMER, configured, in_turns
from parallel.devices import synchronize

ONE, APART = "1 replica", "2 processes apart"
BUCKETS = (1, 5, 25, 100)  # MiB


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all runs."""
    batch = 2 if chosen.quick else 16  # sequences of 128 tokens per replica and step
    common = [*TRANSFORMER, "logger=none", "train.precision=fp32", f"device={ranks.device_type()}"]
    common += ["model.d_model=32", "data.seq_len=16"] if chosen.quick else []
    setup = configured(common)  # prepares the tokens once, and not on both ranks
    rows = rows_of(ranks.run(in_turns, layouts(common, batch), chosen.rounds, ONE), batch)
    size = sum(p.numel() for p in setup.chain.skeleton().parameters())
    alone = ranks.run(all_reduce, size)
    exchange = f"{size * 4 / 1e6:.1f} MB of gradients; one all-reduce of them alone: {alone:.4f} s"
    about = {"batch": batch, "rounds": chosen.rounds, "precision": "fp32", "exchange": exchange}
    yield Table("ddp", rows, about, draw)


def layouts(common: list[str], batch: int) -> dict[str, list[str]]:
    """Return the command line of each run by its name; ``batch`` is that of one replica."""
    ddp = [*common, "parallel=ddp", "parallel.dp=2", f"train.global_batch_size={2 * batch}"]
    runs = {name: [*common, "parallel=single", f"train.global_batch_size={batch}"] for name in (ONE, APART)}
    runs |= {f"2 replicas, {mb} MiB": [*ddp, f"parallel.bucket_mb={mb}"] for mb in BUCKETS}
    runs["2 replicas, 25 MiB, bf16"] = [*ddp, "parallel.comm_hook=bf16"]
    return runs


def all_reduce(rank: int, size: int) -> float:
    """Return the seconds of one all-reduce of ``size`` numbers."""
    gradients = torch.zeros(size, device=ranks.device_type())

    def exchange(number: int) -> None:
        dist.all_reduce(gradients)
        synchronize(gradients.device)

    return Spread.of(take_turns({"": exchange}, 10, barrier=dist.barrier)[""]).median


def rows_of(seconds: dict[str, list[float]], batch: int) -> list[dict]:
    """Return the rows of the table; ratios are medians over rounds, in which all runs met the same noise."""

    def columns(name: str, spread: Spread) -> dict[str, str]:
        replicas = 1 if name == ONE else 2
        return {
            "sequences/s": f"{replicas * batch / spread.median:.2f}",
            "times one replica": f"{replicas / paired(seconds, ONE, name):.2f}",
            "all-reduce": "" if name in (ONE, APART) else f"{1 - 1 / paired(seconds, APART, name):.1%}",
        }

    return tabulate(seconds, columns)


def draw(path: Path, rows: list[dict]) -> None:
    """Draw a bar for each run."""
    figure.bars(path, rows, [row["run"] for row in rows[2:]], width=10.0)


BENCHMARK = Benchmark(measure, rounds=7)
