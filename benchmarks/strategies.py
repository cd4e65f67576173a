"""One small GPT-2 under each strategy: what each rank holds, what it sends in a step, and when it works.

    python -m benchmarks strategies [NAME …] [--quick]

Two or four processes on a CPU train a GPT-2 of 11 million parameters in fp32 with AdamW. One row for each rank:

weights, gradients, optimizer   the bytes of the tensors that the rank holds between steps
whole                           the most bytes of parameters that are whole at once where ranks share them
activations                     the most bytes that autograd keeps for the backward at once
all-reduce … send               the bytes that the rank sends in a step, if each collective is a ring

The collectives are intercepted where torch calls the backend, so those of DistributedDataParallel, FSDP2 and
torch.distributed.pipelining are counted as well. The same numbers are computed by formula.

The figures of the pages in docs/understand/ are timelines of steps that are measured here; --quick leaves them beside
its tables.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from PIL import Image
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import ranks
from benchmarks.table import Benchmark, Table
from benchmarks.trainer import Trainer, configured
from parallel.actions import StageSeconds, stage_seconds
from parallel.dtensor import is_sharded
from parallel.host_group import init_process_group
from parallel.schedules import borders
from parallel.strategy import Strategy
from parallel.timeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Interval,
    now,
    work_span,
)
from parallel.zero_bubble.schedule import MEASURED_STEPS
from planner.simulation import simulate
from training.reporting import plot, timeline
from training.reporting.summary import state_bytes
from training.run.setup import Setup

_PIPELINE = ["parallel=pipelined", "parallel.pp=2", "parallel.chunks=4"]
STRATEGIES = {
    "single": ["parallel=single", "parallel.chunks=4"],
    "model_parallel": ["parallel=model_parallel", "parallel.pp=2", "parallel.chunks=4"],
    "ddp": ["parallel=ddp", "parallel.dp=2", "parallel.chunks=2"],
    "fsdp": ["parallel=fsdp", "parallel.dp=2", "parallel.chunks=2"],
    "hsdp": ["parallel=hsdp", "parallel.dp=4", "parallel.shard=2"],
    "pipelined_gpipe": [*_PIPELINE, "parallel.schedule=gpipe"],
    "pipelined_1f1b": [*_PIPELINE, "parallel.schedule=1f1b"],
    "pipelined_interleaved_1f1b": [*_PIPELINE, "parallel.schedule=interleaved_1f1b"],
    "pipelined_looped_bfs": [*_PIPELINE, "parallel.schedule=looped_bfs"],
    "pipelined_interleaved_zero_bubble": [*_PIPELINE, "parallel.schedule=interleaved_zero_bubble"],
    "pipelined_planned": [*_PIPELINE, "parallel.schedule=planned"],
    "pipe_ddp": ["parallel=pipe_ddp", "parallel.dp=2", "parallel.pp=2", "parallel.chunks=4"],
    "pipe_fsdp": ["parallel=pipe_fsdp", "parallel.dp=2", "parallel.pp=2", "parallel.chunks=4"],
    "tensor": ["parallel=tensor", "parallel.tp=2", "parallel.chunks=4"],
    "sequence": ["parallel=tensor", "parallel.tp=2", "parallel.sequence=true", "parallel.chunks=4"],
}
MODEL = [
    "model=gpt2", "model.size=tiny", "model.n_layer=10", "model.n_head=6", "model.n_embd=288", "model.block_size=32",
    "model.vocab_size=4096", "data=stdlib", "data.vocabulary=words", "data.max_vocabulary=4096", "data.seq_len=32",
    "train.global_batch_size=16", "train.precision=fp32", "logger=none", "device=cpu",
]  # fmt: skip
TOY = [
    *MODEL, "model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.vocab_size=512", "data.max_vocabulary=512",
    "data.seq_len=8", "model.block_size=8", "train.global_batch_size=8",
]  # fmt: skip
PROCESSES = 4
# A planned schedule uses the textbook's times in its first four steps.
RECORDED = 10
STEPS = MEASURED_STEPS + RECORDED
PAGES = Path(__file__).parents[1] / "docs" / "understand"

REDUCE_SCATTER, ALL_TO_ALL, SEND = "reduce_scatter", "all_to_all", "send"
# {operator of torch's backends: (its name, the index of the argument that holds the tensors of all ranks together, how
# many times each rank of a ring sends its part of them)}.
_OPERATORS = {"allreduce_": ("all_reduce", 0, 2), "allgather_": ("all_gather", 0, 1),
              "_allgather_base_": ("all_gather", 0, 1), "_reduce_scatter_base_": (REDUCE_SCATTER, 1, 1),
              "alltoall_base_": (ALL_TO_ALL, 1, 1)}  # fmt: skip
KINDS = ("all_reduce", "all_gather", REDUCE_SCATTER, SEND)


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all ranks, and draw the figures."""
    names = chosen.parts or [*STRATEGIES]
    figures = chosen.output if chosen.quick else PAGES
    common = TOY if chosen.quick else MODEL
    configured(common)  # prepares the words once
    about = {"words": common, "layouts": {name: STRATEGIES[name] for name in names}}
    yield Table("strategies", rows(names, common, figures), about)


def rows(names: Sequence[str], common: Sequence[str], figures: Path) -> Iterator[dict]:
    """Measure the strategies, one after the other in the same processes, draw each, and yield a row for each rank."""
    figures.mkdir(parents=True, exist_ok=True)
    cases = [[*common, *STRATEGIES[name]] for name in names]
    with (
        tempfile.TemporaryDirectory() as stores,
        closing(ranks.Workers(Case, cases, stores, size=PROCESSES, all_cores=True)) as workers,
    ):
        for number, name in enumerate(names):
            found = [Found.parse(one) for one in workers.step(number)]
            save(picture(name, configured(cases[number]), found), figures / f"{name}.png")
            yield from (row(name, rank, one) for rank, one in enumerate(found))


def row(name: str, rank: int, found: Found) -> dict[str, object]:
    """Return a row of the table."""
    sent = {kind: found.sent.get(kind, 0) for kind in KINDS}
    return {
        "strategy": name, "rank": rank, **found.held, "whole": found.whole, "activations": found.activations,
        **sent, "sent": sum(sent.values()), "messages": found.messages,
        **{f"{kind} by formula": size for kind, size in found.held_by_formula.items()},
        "sent by formula": sum(found.sent_by_formula.values()),
    }  # fmt: skip


# -- measuring -------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """What is measured of a rank.

    Attributes:
        held: The bytes of weights, gradients and optimizer state.
        held_by_formula: The same, computed.
        whole: The most bytes of parameters that ranks share and that are whole at once.
        activations: The most bytes that autograd keeps at once.
        sent: The bytes sent in a step, by kind.
        sent_by_formula: The same by what they are for, computed.
        messages: The number of collectives and of messages that are sent.
        steps: The intervals of the recorded steps.
        seconds: The seconds of this rank's stages by index; empty without a pipeline.
    """

    held: dict[str, int]
    held_by_formula: dict[str, int]
    whole: int
    activations: int
    sent: dict[str, int]
    sent_by_formula: dict[str, int]
    messages: int
    steps: list[list[Interval]]
    seconds: dict[str, StageSeconds]

    @classmethod
    def parse(cls, received: Sequence[Any]) -> Found:
        """Read the JSON form, which has lists in the place of tuples."""
        found = cls(*received)
        steps = [[Interval(*interval) for interval in step] for step in found.steps]
        seconds = {stage: StageSeconds(*times) for stage, times in found.seconds.items()}
        return found._replace(steps=steps, seconds=seconds)


class Case:
    """One process, which is a rank of one strategy after the other."""

    def __init__(self, rank: int, cases: Sequence[Sequence[str]], stores: str) -> None:
        self._rank, self._cases, self._stores = rank, cases, stores

    def step(self, number: int) -> list | None:
        """Measure a case in a world of its own; returns ``measured`` if this process is one of its ranks."""
        setup, rank = configured(self._cases[number]), self._rank
        size = setup.plan.processes
        if dist.is_initialized():
            dist.destroy_process_group()
        if rank >= size:
            return None
        if size > 1:
            store = dist.FileStore(f"{self._stores}/{number}", size)
            init_process_group("cpu", rank, size, rank, store, 1800.0)
        return measured(rank, setup)


def measured(rank: int, setup: Setup) -> list:
    """Train some steps as one rank, and return what all ranks found, in the form that ``Found.parse`` reads."""
    trainer = Trainer(setup, rank)
    strategy = trainer.strategy
    passed = strategy.timeline
    passes = Passes(strategy) if passed is None else None
    steps = []
    for number in range(1, STEPS + 1):
        with Collectives(strategy.indices[0]) as collectives:
            trainer.step(number)
        work = passed.steps[-1] if passes is None else passes.take()
        steps.append([*work, *collectives.intervals])
    with (kept := Kept(strategy)):
        trainer.step(STEPS + 1)
    mine = Found(
        state_bytes(strategy, trainer.optimizer.state_of),
        held_by_formula(setup, strategy),
        kept.whole,
        kept.most,
        dict(collectives.sent),
        sent_by_formula(setup, strategy),
        collectives.messages,
        steps[-RECORDED:],
        {str(stage): times for stage, times in stage_seconds([*passed.steps][:-1]).items()} if passed else {},
    )
    found = strategy.mesh.gather(mine)
    strategy.close()
    strategy.mesh.disconnect()
    return found


class Collectives(TorchDispatchMode):
    """Notes what this rank sends within the block.

    Attributes:
        sent: Bytes by kind.
        messages: The number of collectives and sends.
        intervals: When each collective ran, from its call to its end.
    """

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.messages = 0
        self.intervals: list[Interval] = []
        self._stage = stage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start = now()
        returned = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name == SEND:
            self._count(SEND, _bytes(args[0]))
        elif func.namespace == "c10d" and name in _OPERATORS:
            kind, at, times = _OPERATORS[name]
            group = dist.ProcessGroup.unbox(args[2 if isinstance(args[1], list | torch.Tensor) else 1])
            part, whole = group.size() - 1, group.size()
            if kind == ALL_TO_ALL and sum(args[4]):  # the rows for each rank; none if they are equally many
                part, whole = sum(args[4]) - args[4][group.rank()], sum(args[4])
            self._count(kind, times * _bytes(args[at]) * part // whole)
            work = dist.Work.unbox(returned if kind == ALL_TO_ALL else returned[1])
            if kind in (REDUCE_SCATTER, ALL_TO_ALL):  # gloo's has no future, and all callers wait for it at once
                work.wait()
                self._note(kind, start)
            else:
                work.get_future().then(lambda _: self._note(kind, start))
        return returned

    def _note(self, kind: str, start: float) -> None:
        self.intervals.append(Interval(kind, self._stage, 0, start, now()))

    def _count(self, kind: str, size: int) -> None:
        self.sent[kind] += size
        self.messages += 1


def _bytes(tensors: torch.Tensor | Sequence) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


class Passes:
    """Notes when a strategy without a pipeline runs the forward and the backward of each stage."""

    def __init__(self, strategy: Strategy) -> None:
        self._found: list[Interval] = []
        self._open: tuple[str, int, int, float] | None = None
        passes, last = self, strategy.indices[-1]

        class Watched(type(strategy)):
            """The strategy, whose passes are noted as it begins them."""

            @property
            def computing(self) -> tuple[str, int] | None:
                return vars(self)["computing"]

            @computing.setter
            def computing(self, value: tuple[str, int] | None) -> None:
                vars(self)["computing"] = value
                if value is None:
                    passes._close()
                else:
                    kind, microbatch = value
                    passes._next(kind, 0 if kind == FORWARD else last, microbatch)

        strategy.__class__ = Watched
        for index, stage in zip(strategy.indices, strategy.stages, strict=True):
            if index > 0:
                stage.register_forward_pre_hook(partial(self._entered, index))
            if index < last:
                stage.register_forward_hook(partial(self._left, index))

    def take(self) -> list[Interval]:
        """Return what was noted since the last call."""
        found, self._found = self._found, []
        return found

    def _entered(self, index: int, *_: object) -> None:
        assert self._open is not None
        self._next(FORWARD, index, self._open[2])

    def _left(self, index: int, stage: object, given: object, output: torch.Tensor) -> None:
        assert self._open is not None
        microbatch = self._open[2]
        if output.requires_grad:
            output.register_hook(lambda _: self._next(BACKWARD, index, microbatch))

    def _next(self, kind: str, stage: int, microbatch: int) -> None:
        self._close()
        self._open = kind, stage, microbatch, now()

    def _close(self) -> None:
        if self._open is not None:
            self._found.append(Interval(*self._open, now()))
            self._open = None


class Kept(saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the backward, without parameters.

    Attributes:
        most: The most bytes at once.
        whole: The most bytes of shared parameters that were whole at once.
    """

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(self._pack, lambda kept: kept.tensor if isinstance(kept, _Kept) else kept)
        self.most = self.whole = 0
        self._strategy, self._users, self._now = strategy, Counter(), 0

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        whole = {p.untyped_storage().data_ptr(): p for p in self._strategy.parameters() if not is_sharded(p)}
        if self._strategy.plan.shards > 1:
            self.whole = max(self.whole, sum(p.untyped_storage().nbytes() for p in whole.values()))
        storage = tensor.untyped_storage()
        if storage.data_ptr() in whole:
            return tensor
        key = storage.data_ptr(), storage.nbytes()
        if not self._users[key]:
            self._now += storage.nbytes()
            self.most = max(self.most, self._now)
        self._users[key] += 1
        return _Kept(tensor, partial(self._free, key))

    def _free(self, key: tuple[int, int]) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            self._now -= key[1]


class _Kept:
    def __init__(self, tensor: torch.Tensor, free: Callable[[], None]) -> None:
        self.tensor, self._free = tensor, free

    def __del__(self) -> None:
        self._free()


# -- by formula ------------------------------------------------------------------------------------------------------


def held_by_formula(setup: Setup, strategy: Strategy) -> dict[str, int]:
    """Return the bytes of fp32 weights, gradients and AdamW's state: 4, 4 and 8 for each number that a rank holds.

    AdamW also counts the steps of each tensor, in 4 bytes.
    """
    numbers = _numbers(setup, strategy)
    tensors = sum(1 for _ in strategy.parameters())
    return {"weights": 4 * numbers, "gradients": 4 * numbers, "optimizer": 8 * numbers + 4 * tensors}


def _numbers(setup: Setup, strategy: Strategy) -> int:
    """Return how many numbers of the model a rank holds: the parameters of its stages, or its part of them."""
    plan = setup.plan
    parameters = sum(plan.stages[index].parameters for index in strategy.indices)
    whole = _whole_beside_cut(setup) if plan.tp > 1 else 0
    return (parameters - whole) // plan.tp // plan.shards + whole


def _whole_beside_cut(setup: Setup) -> int:
    """Return the parameters of a GPT-2 that tensor parallelism leaves whole: norms, biases of rows, and positions."""
    model = setup.cfg.model
    return _norms_and_biases(setup) + model.block_size * model.n_embd


def _norms_and_biases(setup: Setup) -> int:
    return (6 * setup.cfg.model.n_layer + 2) * setup.cfg.model.n_embd


def sent_by_formula(setup: Setup, strategy: Strategy) -> dict[str, int]:
    """Return the bytes that a rank sends in a step of one of ``STRATEGIES``, by what they are for.

    The names are those of docs/understand/: P parameters of the rank's stages, m micro-batches, A bytes of what layers
    pass on for one of them, L blocks.
    """
    plan, model = setup.plan, setup.cfg.model
    m, sample = plan.chunks, setup.sample
    assert sample is not None
    tokens = sample.inputs.numel()
    hidden, each = 4 * tokens * model.n_embd, 4 * sum(plan.stages[index].parameters for index in strategy.indices)
    sent = {"numbers": _ring(8 * (5 + len(setup.chain.loss.metrics)), plan.processes, 2)}
    tied = 4 * model.vocab_size * model.n_embd
    if plan.pipelined:
        beside = borders(len(plan.stages))
        sent["stages"] = m * hidden * sum(beside[index] for index in strategy.indices)
        sent["tied"] = _ring(tied // plan.shards, 2, 2)
    if plan.tp > 1:
        both = 4 * model.n_layer + 2
        if plan.sequence:
            layers = _ring((2 * both - 1) * hidden, plan.tp, 1) + _ring(hidden + 12 * tokens, plan.tp, 2)
            sent["partial"] = _ring(4 * _norms_and_biases(setup), plan.tp, 2)
        else:
            layers = _ring(both * hidden + 12 * tokens, plan.tp, 2)
        sent["layers"] = m * layers
    if plan.shards == 1:
        sent["replicas"] = _ring(each, plan.dp, 2)
    elif plan.reshard:  # what is tied, and what lies beside it in its layers, stays whole until the backward
        stay = tied + 4 * (model.block_size + 2) * model.n_embd
        sent["shards"] = m * _ring(3 * each - stay, plan.shards, 1)
    else:
        sent["shards"] = _ring(2 * each, plan.shards, 1)
    if plan.shards > 1:
        sent["copies"] = _ring(each // plan.shards, plan.dp // plan.shards, 2)
    return sent


def _ring(size: int, ranks: int, times: int) -> int:
    """Return the bytes that each rank of a ring sends: once for an all-gather or reduce-scatter of ``size`` bytes."""
    return times * size * (ranks - 1) // ranks


# -- figures ---------------------------------------------------------------------------------------------------------


def picture(name: str, setup: Setup, found: Sequence[Found]) -> Figure:
    """Draw the fastest of the recorded steps; of a pipeline without replicas below the simulated one."""
    plan = setup.plan
    title = f"{plan.name}: GPT-2 with {plan.parameters / 1e6:.1f} M parameters"
    drawn_ranks = plan.mesh(0).pipeline(0) if plan.pipelined else range(plan.processes)
    count = len(found[0].steps)
    fastest = min(range(count), key=lambda number: _span([found[rank].steps[number] for rank in drawn_ranks]))
    step = {rank: found[rank].steps[fastest] for rank in drawn_ranks}
    which = f"measured, the fastest of {count} steps"
    if not plan.pipelined or plan.dp > 1:
        return timeline.draw(step, title, f"replica 0 of {plan.dp}, {which}" if plan.pipelined else which)
    assert plan.schedule is not None
    seconds = {int(stage): times for rank in found for stage, times in rank.seconds.items()}
    order = simulate([seconds[i] for i in range(len(plan.stages))], plan.pp, plan.chunks, plan.schedule)
    with plot.style():
        figure = timeline.beside(order, {rank: [own] for rank, own in step.items()}, title)
        figure.axes[1].set_title(which)
    return figure


def _span(step: Sequence[Sequence[Interval]]) -> float:
    first, last = work_span([interval for own in step for interval in own])
    return last - first


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG of 64 colours, which is half as large as matplotlib's."""
    buffer = BytesIO()
    figure.savefig(buffer)
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)


def drawn(schedule: str, ranks: int = 2, chunks: int = 4, per_rank: int = 1) -> str:
    """Return a schedule's order as text: one line for each rank, and one column for the time of a forward.

    F, B, I and W are a forward, a backward, and the parts of a split one for inputs and for weights, before the index
    of the micro-batch. Those of a rank's second stage are in lower case. A backward takes two columns.
    """
    step = simulate([StageSeconds(1.0, 2.0, 1.0, 1.0)] * (ranks * per_rank), ranks, chunks, schedule)
    end = round(max(interval.end for own in step.values() for interval in own))
    lines = []
    for rank, own in step.items():
        columns = [". "] * end
        for kind, stage, microbatch, start, stop in own:
            if kind in _LETTERS:
                letter = _LETTERS[kind] if stage < ranks else _LETTERS[kind].lower()
                columns[round(start) : round(stop)] = [f"{letter}{microbatch}"] * (round(stop) - round(start))
        lines.append(f"rank {rank}   {' '.join(columns)}".rstrip())
    return "\n".join(lines)


_LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}


BENCHMARK = Benchmark(measure, parts=tuple(STRATEGIES), one_table=True)
