"""Two replicas against one, one core (or GPU) and one thread each, and the cost of the gradients' exchange.

    python -m benchmarks ddp [--rounds 7] [--batch 16] [--quick]

A small Transformer with the same batch per replica in every run; all runs take turns in the same two processes:

1 replica               rank 0 alone while the other core is idle
2 processes apart       both at the same time, without communication: the cost of sharing the machine's memory
2 replicas              DistributedDataParallel, for each bucket size, and with gradients sent as bf16

``all-reduce`` is exposed communication, as a fraction of the step: the time that ``2 processes apart`` does not need.
"""

from __future__ import annotations

import sys
from argparse import Namespace

import torch
import torch.distributed as dist

from benchmarks import figure, ranks, table
from benchmarks.timing import Spread, paired, take_turns
from benchmarks.trainer import TRANSFORMER, Trainer, configured
from parallel.devices import synchronize

ONE, APART = "1 replica", "2 processes apart"
BUCKETS = (1, 5, 25, 100)  # MiB


OPTIONS = {
    **table.QUICK,
    "--rounds": dict(type=int, default=7),
    "--batch": dict(type=int, default=16, help="sequences of 128 tokens per replica and step"),
    "--precision": dict(default="fp32"),
}


def main(chosen: Namespace) -> None:
    """Measure, and writes results/ddp.csv and .png."""
    batch, rounds = (2, 2) if chosen.quick else (chosen.batch, chosen.rounds)
    common = [*TRANSFORMER, "logger=none", f"train.precision={chosen.precision}", f"device={ranks.device_type()}"]
    common += ["model.d_model=32", "data.seq_len=16"] if chosen.quick else []
    configured(common)  # prepares the tokens once, and not on both ranks
    seconds, all_reduce, megabytes = ranks.run(measure, common, batch, rounds)
    rows = tabulate(seconds, batch)
    exchange = f"{megabytes:.1f} MB of gradients; one all-reduce of them alone: {all_reduce:.4f} s"
    print(f"{exchange}\n")
    about = {"batch": batch, "rounds": rounds, "precision": chosen.precision, "exchange": exchange}
    path = table.write("ddp", rows, chosen.quick, **about)
    figure.bars(path.with_suffix(".png"), rows, [row["run"] for row in rows[2:]], width=10.0, title=title(rows))


def layouts(batch: int) -> dict[str, list[str]]:
    """Return the overrides of each run by its name; ``batch`` is that of one replica."""
    ddp = ["parallel=ddp", "parallel.dp=2", f"train.global_batch_size={2 * batch}"]
    runs = {name: ["parallel=single", f"train.global_batch_size={batch}"] for name in (ONE, APART)}
    runs |= {f"2 replicas, {mb} MiB": [*ddp, f"parallel.bucket_mb={mb}"] for mb in BUCKETS}
    runs["2 replicas, 25 MiB, bf16"] = [*ddp, "parallel.comm_hook=bf16"]
    return runs


def measure(rank: int, common: list[str], batch: int, rounds: int) -> tuple[dict[str, list[float]], float, float]:
    """Measure one rank's part.

    Returns:
        Seconds of each run's steps; seconds of one all-reduce of the gradients; their size in MB.
    """
    steps, trainer = {}, None
    for name, overrides in layouts(batch).items():
        if name == ONE and rank != 0:
            steps[name] = lambda number: None
            continue
        setup = configured([*common, *overrides])
        # Without communication, each process is the first rank of its own layout.
        trainer = Trainer(setup, rank if setup.plan.dp > 1 else 0, local_rank=rank)
        steps[name] = trainer.step
    seconds = take_turns(steps, rounds, barrier=dist.barrier)
    gradients = torch.zeros(sum(p.numel() for p in trainer.strategy.parameters()), device=trainer.strategy.device)

    def exchange(number: int) -> None:
        dist.all_reduce(gradients)
        synchronize(gradients.device)

    alone = take_turns({"": exchange}, 10, barrier=dist.barrier)[""]
    if rank == 0:
        print(f"{rounds} rounds of {len(steps)} runs measured", file=sys.stderr)
    return seconds, Spread.of(alone).median, gradients.nbytes / 1e6


def tabulate(seconds: dict[str, list[float]], batch: int) -> list[dict]:
    """Return the rows of the table; ratios are medians over rounds, in which all runs met the same noise."""
    rows = []
    for name, values in seconds.items():
        spread = Spread.of(values)
        replicas = 1 if name == ONE else 2
        exposed = 1 - 1 / paired(seconds, APART, name)
        rows.append(
            {
                "run": name,
                **spread.columns(),
                "sequences/s": f"{replicas * batch / spread.median:.2f}",
                "times one replica": f"{replicas / paired(seconds, ONE, name):.2f}",
                "all-reduce": "" if name in (ONE, APART) else f"{exposed:.1%}",
            }
        )
    return rows


def title(rows: list[dict]) -> str:
    """Return what the table shows, in one line."""
    gains = [float(row["times one replica"]) for row in rows if row["all-reduce"]]
    exposed = max(float(row["all-reduce"].rstrip("%")) for row in rows if row["all-reduce"])
    return (
        f"Two replicas do {min(gains):.2f} to {max(gains):.2f} times the work of one; "
        f"waiting for the all-reduce takes at most {exposed:.1f} % of a step"
    )
