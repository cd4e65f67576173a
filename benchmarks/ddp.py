"""Two replicas against one, a core (or a GPU) and one thread each, and what the exchange of gradients costs.

    python -m benchmarks.ddp [--rounds 7] [--batch 16] [--quick]

A small Transformer, the same batch a replica in every run, all in the same two processes and in turns:

1 replica               rank 0 alone while the other core rests
2 processes apart       both at the same time without a word: what sharing the machine's memory costs
2 replicas              DistributedDataParallel, for each bucket size, and with gradients sent as bf16

``all-reduce`` is the share of a replica's step that ``2 processes apart`` does without: what of the exchange the
backward does not hide.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

from benchmarks import figure, ranks, table
from benchmarks.timing import Spread, paired, take_turns
from benchmarks.trainer import TRANSFORMER, Trainer, configured, wait_for

ONE, APART = "1 replica", "2 processes apart"
BUCKETS = (1, 5, 25, 100)  # MiB


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--batch", type=int, default=16, help="sequences of 128 tokens a replica and step")
    options.add_argument("--precision", default="fp32")
    options.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    chosen = options.parse_args()
    batch, rounds = (2, 2) if chosen.quick else (chosen.batch, chosen.rounds)
    common = [*TRANSFORMER, "logger=none", f"train.precision={chosen.precision}", f"device={ranks.device_type()}"]
    common += ["model.d_model=32", "data.seq_len=16"] if chosen.quick else []
    configured(common)  # tokens: once, and not on both ranks
    found = ranks.run("benchmarks.ddp:measure", common, batch, rounds)
    rows = tabulate(found["seconds"], batch)
    print(table.markdown(rows))
    alone = f"{found['megabytes']:.1f} MB of gradients; one all-reduce of them alone: {found['all_reduce']:.4f} s"
    print(f"\n{alone}")
    path = table.write(
        "ddp", rows, chosen.quick, batch=batch, rounds=rounds, precision=chosen.precision, exchange=alone
    )
    drawing, (axes,) = figure.canvas(width=10.0)
    figure.bars(axes, {r["run"]: figure.spread_of(r) for r in rows}, "seconds a step", [r["run"] for r in rows[2:]])
    axes.tick_params(axis="x", labelsize="x-small")
    drawing.savefig(path.with_suffix(".png"))
    print(f"written to {path} and {path.with_suffix('.png')}")


def layouts(batch: int) -> dict[str, list[str]]:
    """Overrides by the name of the run; ``batch`` is a replica's."""
    ddp = ["parallel=ddp", "parallel.dp=2", f"train.global_batch_size={2 * batch}"]
    ways = {name: ["parallel=single", f"train.global_batch_size={batch}"] for name in (ONE, APART)}
    ways |= {f"2 replicas, {mb} MiB": [*ddp, f"parallel.bucket_mb={mb}"] for mb in BUCKETS}
    ways["2 replicas, 25 MiB, bf16"] = [*ddp, "parallel.comm_hook=bf16"]
    return ways


def measure(rank: int, common: list[str], batch: int, rounds: int) -> dict:
    """Seconds of each run's steps; the gradients' size, and seconds of one all-reduce of it."""
    steps, trainers = {}, []
    for name, way in layouts(batch).items():
        if name == ONE and rank != 0:
            steps[name] = lambda number: None
            continue
        setup = configured([*common, *way])
        # Alone or apart, each rank is the first of one.
        trainers.append(Trainer(setup, rank if setup.plan.dp > 1 else 0, local_rank=rank))
        steps[name] = trainers[-1].step
    seconds = take_turns(steps, rounds, meet=dist.barrier)
    strategy = trainers[-1].strategy
    gradients = torch.zeros(sum(p.numel() for p in strategy.parameters()), device=strategy.device)

    def exchange(number: int) -> None:
        dist.all_reduce(gradients)
        wait_for(gradients.device)

    alone = take_turns({"": exchange}, 10, meet=dist.barrier)[""]
    for trainer in trainers:
        trainer.close()
    if rank == 0:
        print(f"{rounds} rounds of {len(steps)} runs measured", file=sys.stderr)
    return {"seconds": seconds, "all_reduce": Spread.of(alone).median, "megabytes": gradients.nbytes / 1e6}


def tabulate(seconds: dict[str, list[float]], batch: int) -> list[dict]:
    """Rows of the table; ratios are medians over rounds, in which all runs met the same noise."""
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


if __name__ == "__main__":
    main()
