"""The README's picture: a pipeline at work, beside the loss curves of all strategies, which lie on each other.

    python -m benchmarks.promise

trains a tiny GPT-2 under each strategy and writes results/promise.png.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import figure, table
from benchmarks.parity import layouts, run
from parallel.timeline import Interval
from training.reporting.timeline_figure import diagram

_WORDS = [
    "model=gpt2", "model.size=tiny", "model.dropout=0.1", "device=cpu", "data.seq_len=64", "optim=adamw",
    "optim.lr=3e-3", "train.epochs=null", "train.steps=25", "train.global_batch_size=16", "train.precision=fp32",
    "train.eval_every=null", "train.checkpoint_every=null", "logger=none", "parallel.threads=1",
]  # fmt: skip
_MICROBATCHES = 8
_TRACED = ["parallel=pipelined", "parallel.pp=2", "parallel.schedule=1f1b"]


def main() -> None:
    """Trains under each strategy and draws."""
    curves = {}
    for layout in [["parallel=single"], *layouts()]:
        replicas = next((int(word.partition("=")[2]) for word in layout if word.startswith("parallel.dp=")), 1)
        with run([*_WORDS, *layout, f"parallel.chunks={_MICROBATCHES // replicas}"]) as folder:
            records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            curves[layout[0]] = [record["loss"] for record in records if "loss" in record]
        print(layout[0], curves[layout[0]][-1], file=sys.stderr)
    with run([*_WORDS, *_TRACED, f"parallel.chunks={_MICROBATCHES}", "train.trace=true"]) as folder:
        ranks = step(folder / "timeline.json")
    print(f"figure: {draw(table.RESULTS / 'promise.png', ranks, curves)}")


def step(path: Path) -> dict[int, list[Interval]]:
    """Returns the intervals of one step of a timeline.json by rank, in seconds."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    number = sorted({event["args"]["step"] for event in events})[0]
    ranks: dict[int, list[Interval]] = {}
    for event in events:
        about = event["args"]
        if about["step"] == number:
            kind = event["name"].rsplit(" ", 1)[0].replace(" ", "_")
            start = event["ts"] / 1e6
            interval = Interval(kind, about["stage"], about["microbatch"], start, start + event["dur"] / 1e6)
            ranks.setdefault(event["tid"] // 100, []).append(interval)
    return dict(sorted(ranks.items()))


def draw(path: Path, ranks: dict[int, list[Interval]], curves: dict[str, list[float]]) -> Path:
    """Writes the picture to ``path`` and returns it."""
    canvas, (left, right) = figure.canvas(columns=2, width=6.5)
    handles = diagram(left, ranks, width=5.5)
    left.set_title("one step of parallel=pipelined, measured", fontsize="medium")
    left.legend(handles=handles[:3], loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)
    # The widest first: each curve shows at the edges of the one that lies on it.
    for place, (name, losses) in enumerate(curves.items()):
        steps = range(1, len(losses) + 1)
        right.plot(steps, losses, label=name, linewidth=2.0 * (len(curves) - place), solid_capstyle="butt")
    right.set_title("the loss under every strategy", fontsize="medium")
    right.set(xlabel="step", ylabel="training loss")
    right.legend(frameon=False)
    canvas.savefig(path)
    return path


if __name__ == "__main__":
    main()
