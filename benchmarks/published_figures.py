"""The figures of PyTorch's tutorial on model parallelism, regenerated here: three bar charts and the split-size curve.

    python -m benchmarks.published_figures [--repeats 5] [--quick]

ResNet-50 on batches of 120 random 128x128 images, squared error, SGD; two stages, up to layer2 and from layer3 on
(``parallel.balance=[11,11]``), on two GPUs where there are as many, else in two processes on a core each. Published, on
two GPUs, for three batches: single 3.75 s, model parallel 4.02 s, pipelined 2.51 s (split size 20), best 2.43 s (12).

Source: "Single-Machine Model Parallel Best Practices" (PyTorch tutorials), whose chart 1 compares a single device with
model parallel, chart 2 adds pipelining, chart 3 plots the split size, and the text adds the best of them as a bar.
"""

from __future__ import annotations

import argparse
import sys

import torch.distributed as dist

from benchmarks import figure, ranks, table
from benchmarks.timing import Spread, take_turns
from benchmarks.trainer import Trainer, configured

SPLITS = (1, 3, 5, 8, 10, 12, 20, 40, 60)  # images in a micro-batch, as published
PUBLISHED_SPLIT = 20
SINGLE, NAIVE, PIPELINED, BEST = "single device", "model parallel", "pipelined", "pipelined, best split"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=None, help="batches measured of each; 10 on GPUs, else 4")
    options.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    chosen = options.parse_args()
    gpus = ranks.device_type() == "cuda"
    repeats = 1 if chosen.quick else chosen.repeats or (10 if gpus else 4)
    batch, image, splits = (24, 64, (4, 12)) if chosen.quick else (120, 128, SPLITS)
    seconds = ranks.run("benchmarks.published_figures:measure", batch, image, splits, repeats)
    rows = tabulate(seconds, batch, splits)
    print(table.markdown(rows))
    where = "two GPUs" if gpus else "two cores, one thread a process"
    path = table.write("published_figures", rows, chosen.quick, batch=batch, repeats=repeats, where=where)
    print(f"written to {path}, and {', '.join(str(p) for p in draw(rows, path.parent, where))}")


def measure(rank: int, batch: int, image: int, splits: list[int], repeats: int) -> dict[str, list[float]]:
    """Seconds of each batch by the name of the run: SINGLE, NAIVE, and the split sizes as words."""
    layout = ["parallel=pipelined", "parallel.pp=2", "parallel.balance=[11,11]"]
    ways = {SINGLE: ["parallel=single"], NAIVE: [*layout, "parallel.chunks=1"]}
    ways |= {str(split): [*layout, f"parallel.chunks={batch // split}"] for split in splits}
    common = [
        "model=resnet50", f"data.image_size={image}", f"train.global_batch_size={batch}", "train.precision=fp32",
        f"device={ranks.device_type()}", "logger=none",
    ]  # fmt: skip
    trainers = {
        name: Trainer(configured([*common, *way]), rank) for name, way in ways.items() if name != SINGLE or rank == 0
    }
    steps = {name: trainers[name].step if name in trainers else lambda number: None for name in ways}
    seconds = take_turns(steps, repeats, meet=dist.barrier)
    for trainer in trainers.values():
        trainer.close()
    if rank == 0:
        print(f"{repeats} batches of each of {len(ways)} ways measured", file=sys.stderr)
    return seconds


def tabulate(seconds: dict[str, list[float]], batch: int, splits: tuple[int, ...]) -> list[dict]:
    """A row for each way; ``against single`` is the gain in throughput over one device."""
    single = Spread.of(seconds[SINGLE]).median
    rows = []
    for name, values in seconds.items():
        spread = Spread.of(values)
        split = int(name) if name not in (SINGLE, NAIVE) else None
        mean = sum(values) / len(values)
        rows.append(
            {
                "run": name if split is None else PIPELINED,
                "split size": "" if split is None else split,
                **spread.columns(),
                "mean": f"{mean:.3f}",
                "standard deviation": f"{(sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5:.3f}",
                "images/s": f"{batch / spread.median:.2f}",
                "against single": f"{single / spread.median - 1:+.0%}",
            }
        )
    return rows


def draw(rows: list[dict], folder, where: str) -> list:
    """The three bar charts side by side, and the curve."""
    by_split = {int(row["split size"]): row for row in rows if row["split size"] != ""}
    best = min(by_split, key=lambda split: figure.spread_of(by_split[split]).median)
    shown = PUBLISHED_SPLIT if PUBLISHED_SPLIT in by_split else max(by_split)
    spreads = {row["run"]: figure.spread_of(row) for row in rows if row["split size"] == ""}
    pipelined = {f"{PIPELINED} (split {shown})": figure.spread_of(by_split[shown])}
    charts = [spreads, spreads | pipelined]
    charts.append(charts[1] | {f"{BEST} ({best})": figure.spread_of(by_split[best])})
    drawing, axes = figure.canvas(columns=3)
    for one, chart in zip(axes, charts, strict=True):
        figure.bars(one, chart, "seconds a batch", ours=[n for n in chart if n.startswith(PIPELINED)])
        one.tick_params(axis="x", labelsize="small")
    drawing.suptitle(f"ResNet-50, {where}")
    bars = folder / "published_bars.png"
    drawing.savefig(bars)

    drawing, (axes,) = figure.canvas()
    sizes = sorted(by_split)
    means = [float(by_split[size]["mean"]) for size in sizes]
    axes.errorbar(
        sizes, means, [float(by_split[size]["standard deviation"]) for size in sizes], fmt="o-", color=figure.BLUE,
        capsize=4,
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlabel("split size: images in a micro-batch")
    axes.set_ylabel("seconds a batch: mean and standard deviation")
    axes.set_title(f"ResNet-50, {where}")
    splits = folder / "published_splits.png"
    drawing.savefig(splits)
    return [bars, splits]


if __name__ == "__main__":
    main()
