"""Two processes that share each sequence against one process, one thread each: seconds, memory, and what is sent.

    python -m benchmarks context [gather] [ulysses] [ring] [--rounds 3] [--quick]

A Llama of 30 million parameters trains on rows of 8,192 tokens in fp32. The layouts take turns in the same two
processes; one of them waits while the other trains alone.

activations       the most bytes that autograd keeps for the backward at once, of the rank with the most
a layer sends     the bytes that a rank sends in attention, in a step and for each layer; also by the planner's formula
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from benchmarks import ranks
from benchmarks.strategies import Collectives, Kept
from benchmarks.table import Benchmark, Table
from benchmarks.timing import Spread, paired, tabulate, take_turns
from benchmarks.trainer import Trainer, configured
from planner.layout import PlannedLayout
from planner.work import sent_of
from training.reporting.summary import state_bytes
from training.run.setup import Setup

ONE = "1 process"
WAYS = ("gather", "ulysses", "ring")
MODEL = [
    "model=llama", "model.size=tiny", "model.n_layer=9", "model.n_head=8", "model.kv_heads=4", "model.n_embd=512",
    "model.mlp_width=1408", "model.vocabulary=words", "model.vocab_size=8192", "model.block_size=8192", "data=stdlib",
    "data.max_vocabulary=8192", "data.seq_len=8192", "train.global_batch_size=1", "train.precision=fp32", "logger=none",
    "device=cpu",
]  # fmt: skip
TOY = [
    *MODEL, "model.n_layer=2", "model.n_head=4", "model.kv_heads=2", "model.n_embd=32", "model.mlp_width=64",
    "data.max_vocabulary=512", "model.vocab_size=512", "data.seq_len=64",
]  # fmt: skip


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all layouts."""
    common = TOY if chosen.quick else MODEL
    runs = {ONE: [*common, "parallel=single"]}
    for way in chosen.parts or WAYS:
        runs[f"cp=2, {way}"] = [*common, "parallel=context", "parallel.cp=2", f"parallel.context={way}"]
    setup = configured(runs[ONE])  # prepares the tokens once, and not on both ranks
    about = {"words": common, "rounds": chosen.rounds, "parameters": setup.plan.parameters}
    seconds, found = ranks.run(side_by_side, runs, chosen.rounds)

    def columns(name: str, spread: Spread) -> dict[str, str]:
        one, mine = found[ONE].activations, found[name].activations
        return {
            "times one process": f"{paired(seconds, ONE, name):.2f}",
            "MiB of activations": f"{mine / 2**20:,.0f}",
            "times those of one process": f"{mine / one:.2f}",
            **sent_columns(configured(runs[name]), found[name]),
        }

    yield Table("context", tabulate(seconds, columns), about)


class Found(NamedTuple):
    """What is measured of the fullest rank, in bytes.

    Attributes:
        activations: The most that autograd keeps at once.
        held: Weights, gradients and optimizer state.
        sent: What the layers send in a step; gradients, which are all-reduced, do not count.
    """

    activations: int
    held: Mapping[str, int]
    sent: int


def side_by_side(
    rank: int, runs: Mapping[str, Sequence[str]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Found]]:
    """Measure layouts that take turns, as one of the ranks. Layouts of one process run on the first rank alone."""
    steps, found = {}, {}
    for name, words in runs.items():
        setup, steps[name] = configured(words), lambda number: None
        if rank < setup.plan.processes:
            trainer = Trainer(setup, rank)
            found[name], steps[name] = _found(trainer), trainer.step
        dist.barrier()
    every: list[Any] = [None] * ranks.RANKS
    dist.all_gather_object(every, found)
    fullest = {}
    for name in runs:
        several = [mine[name] for mine in every if name in mine]
        held = {kind: max(rank.held[kind] for rank in several) for kind in several[0].held}
        fullest[name] = Found(max(rank.activations for rank in several), held, max(rank.sent for rank in several))
    return take_turns(steps, rounds, barrier=dist.barrier), fullest


def _found(trainer: Trainer) -> Found:
    strategy = trainer.strategy
    with (kept := Kept(strategy)), Collectives(strategy.indices[0]) as collectives:
        trainer.step(1)
    sent = sum(size for kind, size in collectives.sent.items() if kind != "all_reduce")
    return Found(kept.most, state_bytes(strategy, trainer.optimizer.state_of), sent)


def sent_columns(setup: Setup, found: Found) -> dict[str, str]:
    """Return what a layer sends, as measured and by formula, in MiB; empty for one process."""
    layout = PlannedLayout.of_plan(setup.plan)
    sent = [sum(sent_of(work, layout).values()) for work in setup.work[0]]
    layers = sum(map(bool, sent))
    numbers = [found.sent / max(1, layers), max(sent) * 4 * layout.samples * layout.chunks]
    texts = [f"{size / 2**20:.2f}" if layers else "" for size in numbers]
    return dict(zip(("MiB that a layer sends", "by formula"), texts, strict=True))


BENCHMARK = Benchmark(measure, rounds=3, parts=WAYS, one_table=True)
