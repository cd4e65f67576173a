"""Two processes that share every layer against one process with both cores, and the host time of one such layer.

    python -m benchmarks tensor [runs] [layers] [--rounds 3] [--quick]

runs: GPT-2 124M and a Llama of that size, by train.py as it is.

layers: a block of GPT-2 of width 32, and its MLP alone, forward and backward in two processes of one thread each. So
small a layer takes the time of Python, of torch's operators, and of the collectives, which are also timed alone. *Host*
is the CPU time of the thread that computes, without what it waits for.

What is compared takes turns. Ratios are medians over rounds, and the microseconds of layers over all turns.
"""

from __future__ import annotations

import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import ranks
from benchmarks.command_line import run_directory
from benchmarks.table import Benchmark, Table
from benchmarks.timing import take_turns
from models.gpt2 import gpt2
from parallel.axes.tensor import TensorParallel
from parallel.layout import Layout
from parallel.mesh import TENSOR, Mesh, Ranks, reduce_scatter
from training.reporting.metrics import SUMMARY

PARTS = ("runs", "layers")
MODELS = {
    "gpt2 124M": ["model=gpt2"],
    "llama 135M, 8 heads": ["model=llama", "model.size=135M", "model.n_head=8", "model.kv_heads=4"],
}
LAYOUTS = {
    "single, two threads": ["parallel=single", "parallel.threads=2"],
    "tensor, tp=2": ["parallel=tensor", "parallel.threads=1"],
    "tensor, tp=2, sequence": ["parallel=tensor", "parallel.sequence=true", "parallel.threads=1"],
}
COMMON = [
    "data=stdlib", "train.precision=fp32", "train.epochs=null", "train.eval_every=null", "train.checkpoint_every=null",
    "logger=none", "device=cpu",
]  # fmt: skip
# The layers get (samples, positions, width). A turn computes one of them TIMES times; a round has TURNS turns.
SMALL, TIMES, TURNS = (4, 16, 32), 10, 30
WAYS = {"plain": None, "tp=2": False, "tp=2, sequence": True}  # whether the sequence is divided, too
REGIONS = {"MLP": 1, "block": 2}  # each enters and leaves once, in the forward and in the backward


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the tables of the parts."""
    parts = chosen.parts or PARTS
    if "runs" in parts:
        yield runs(chosen)
    if "layers" in parts:
        turns = 2 if chosen.quick else TURNS * chosen.rounds
        about = {"samples, positions, width": SMALL, "turns": turns, "times in a turn": TIMES}
        yield Table("tensor_layers", ranks.run(time_layers, turns), about)


def runs(chosen: Namespace) -> Table:
    """Return the table of all models."""
    length, batch, steps = (16, 2, 2) if chosen.quick else (256, 4, 4)
    words = [*COMMON, f"data.seq_len={length}", f"train.global_batch_size={batch}", f"train.steps={steps}"]
    models = {"gpt2 tiny": ["model=gpt2", "model.size=tiny"]} if chosen.quick else MODELS
    about = {"rounds": chosen.rounds, "words": words}
    return Table("tensor", (row for name in models for row in rows(name, models[name], words, chosen.rounds)), about)


def rows(name: str, model: list[str], words: list[str], rounds: int) -> Iterator[dict]:
    """Train a model in each layout, in turns, and yield a row for each."""
    summaries: dict[str, list[dict]] = {layout: [] for layout in LAYOUTS}
    for _ in range(rounds):
        for layout, more in LAYOUTS.items():
            with run_directory(*model, *words, *more) as folder:
                summaries[layout].append(json.loads((folder / SUMMARY).read_text()))
    alone = summaries[next(iter(LAYOUTS))]
    for layout, several in summaries.items():
        seconds = [summary["step_time_s"] for summary in several]
        ratios = [one["step_time_s"] / summary["step_time_s"] for one, summary in zip(alone, several, strict=True)]
        yield {
            "model": name,
            "run": layout,
            "seconds a step (median)": f"{statistics.median(seconds):.3f}",
            "times single": f"{statistics.median(ratios):.2f}",
            "GiB of the fullest rank": f"{max(max(s['peak_memory_bytes']) for s in several) / 2**30:.2f}",
            "MiB of weights of a rank": f"{several[0]['weights_bytes'][0] / 2**20:.0f}",
        }


def time_layers(rank: int, turns: int) -> list[dict]:
    """Time plain and cut layers, and the collectives of the latter, in two processes; returns rows in microseconds."""
    mesh = Mesh({TENSOR: ranks.RANKS}, rank).connect(timeout_s=60.0)
    steps = contenders(mesh)
    host: dict[tuple, list[float]] = {key: [] for key in steps}

    def turn(key: tuple, number: int) -> None:
        began = time.thread_time()
        for _ in range(TIMES):
            steps[key]()
        host[key].append(time.thread_time() - began)

    elapsed = take_turns({key: partial(turn, key) for key in steps}, turns, warm_up=0, barrier=dist.barrier)
    mesh.disconnect()
    titles = {"elapsed": (elapsed, False), "its collectives alone": (elapsed, True), "host": (host, False),
              "host of its collectives": (host, True)}  # fmt: skip
    return [
        {"layer": layer, "run": way}
        | {title: _microseconds(timed.get((layer, way, alone))) for title, (timed, alone) in titles.items()}
        for layer in REGIONS
        for way in WAYS
    ]


def contenders(mesh: Mesh) -> dict[tuple[str, str, bool], Callable[[], None]]:
    """Return what is timed, by layer, way, and whether it is the collectives alone."""
    chain = gpt2("tiny", n_layer=1, n_head=2, n_embd=SMALL[-1], block_size=SMALL[1], vocab_size=16)
    steps: dict[tuple[str, str, bool], Callable[[], None]] = {}
    for way, sequence in WAYS.items():
        ((name, block),) = chain.build(chain.names[1:2], 1, torch.device("cpu")).items()
        if sequence is not None:
            layout = Layout("tensor", tp=mesh.size, sequence=sequence)
            TensorParallel(TENSOR, layout, chain, mesh).prepare(name, block, [])
        for layer, module in (("MLP", block.mlp), ("block", block)):
            steps[layer, way, False] = both_ways(module, bool(sequence))
            if sequence is not None:
                steps[layer, way, True] = collectives(mesh.axis(TENSOR), sequence, REGIONS[layer])
    return steps


def both_ways(module: nn.Module, divided: bool) -> Callable[[], None]:
    """Return the forward and backward of a layer, of a part of the sequence if it is ``divided``."""
    samples, positions, width = SMALL
    x = torch.randn(samples, positions // (ranks.RANKS if divided else 1), width, requires_grad=True)
    gradient = torch.randn_like(x)
    return lambda: module(x).backward(gradient)


def collectives(line: Ranks, sequence: bool, regions: int) -> Callable[[], None]:
    """Return what a layer of so many regions sends in its forward and backward."""
    whole = torch.zeros(SMALL)
    parts = whole.view(-1, SMALL[1] // line.size, SMALL[2])
    part = torch.zeros_like(parts[: SMALL[0]])

    def send() -> None:
        for _ in range(2 * regions):
            if sequence:
                line.all_gather(part)
                reduce_scatter(part, parts, group=line.group)
            else:
                dist.all_reduce(whole, group=line.group)

    return send


def _microseconds(turns: list[float] | None) -> str:
    return "" if turns is None else f"{1e6 / TIMES * statistics.median(turns):.0f}"


BENCHMARK = Benchmark(measure, rounds=3, parts=PARTS)
