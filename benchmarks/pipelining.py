"""Pipelining on two cores (or two GPUs): this project, torchgpipe, fairscale, and no pipeline, in one run.

    pip install --no-deps -r benchmarks/requirements.txt
    python -m benchmarks pipelining [PART …] [--rounds 7] [--quick]

Every contender has processes of its own, each on one core with one thread. First each is swept over its numbers of
chunks; then the best of each take turns with ``pipelined``, a few at a time, and the table has the median, fastest and
slowest. The time of a step includes forward, backward, exchange and the update (plain SGD). Precision is fp32 unless
the name says bf16; ResNet-50 has the published experiment's batch, in both memory formats. All contenders start from
the same weights: if the first step's losses do not agree, the benchmark ends with an error.

single               one process, one thread
single, 2 threads    one process on both cores, two threads in every operation: no pipeline at all
naive                model parallel: two stages on two ranks, the whole batch as one chunk
pipelined            this project, best schedule and chunks, stages of equal time (parallel.balance=time)
pipelined, uniform   the same with as many layers in each stage
torchgpipe           with its defaults: two partitions in one process on both cores; all but the last micro-batch
                     recompute their activations; the C library's allocator; best chunks
torchgpipe, tuned    like this project: no recomputation, freed memory is kept (parallel.devices); best chunks
fairscale            likewise, with its defaults and tuned
"""

from __future__ import annotations

import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import figure, peers, ranks
from benchmarks.table import Benchmark, Table
from benchmarks.timing import Spread, paired, take_turns
from benchmarks.trainer import TRANSFORMER, Trainer, configured
from parallel.zero_bubble.schedule import MEASURED_STEPS
from planner.balance import equal_stages, seconds_per_layer


@dataclass(frozen=True)
class Case:
    """A model at one batch size.

    Attributes:
        overrides: The model and its data.
        batch: Samples per step.
        chunks: The numbers of chunks to try.
        peer_chunks: Those to try with the other libraries.
    """

    overrides: tuple[str, ...]
    batch: int
    chunks: tuple[int, ...]
    peer_chunks: tuple[int, ...]


_RESNET50 = Case(("model=resnet50", "data.image_size=128"), 120, (3, 4, 6), (1, 2, 6))
CASES = {
    "resnet50": _RESNET50,
    "resnet50, contiguous": replace(_RESNET50, overrides=(*_RESNET50.overrides, "model.channels_last=false")),
    # Without dropout: the other libraries draw it per partition, this project per micro-batch.
    "transformer": Case((*TRANSFORMER, "model.dropout=0"), 16, (2, 4, 8, 16), (1, 2, 4)),
}
_TINY = {"resnet50": ["data.image_size=64"], "transformer": ["model.d_model=32", "data.seq_len=16"]}
QUICK = {
    name: Case((*case.overrides, *_TINY[name.split(",")[0]]), batch=8, chunks=(2, 4), peer_chunks=(1, 4))
    for name, case in CASES.items()
}

# The number of stages per rank. (gpipe's steps take as long as 1f1b's.)
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "planned": 2}


@dataclass(frozen=True)
class Way:
    """A way of running a case.

    Attributes:
        kind: single | pipelined | torchgpipe | fairscale.
        chunks: The number of micro-batches.
        schedule: The schedule of ``pipelined``.
        balance: The number of layers of each stage.
        precision: As in train.precision.
        threads: The number of threads that one operation uses.
        tuned: Whether another library runs without recomputation and keeps freed memory.
        uniform: Whether all stages have as many layers.
    """

    kind: str
    chunks: int = 1
    schedule: str = "gpipe"
    balance: tuple[int, ...] = ()
    precision: str = "fp32"
    threads: int = 1
    tuned: bool = False
    uniform: bool = False

    @property
    def name(self) -> str:
        """The name in tables."""
        if self.kind in peers.NAMES:
            return f"{self.kind}, tuned" if self.tuned else self.kind
        parts = ["naive" if self.kind == "pipelined" and self.chunks == 1 else self.kind]
        parts += ["uniform"] * self.uniform
        parts += [f"{self.threads} threads"] * (self.threads > 1)
        return ", ".join(parts + [self.precision] * (self.precision != "fp32"))

    def columns(self) -> dict[str, object]:
        """Return how it ran, as columns of a table."""
        split = "+".join(map(str, self.balance)) if self.kind != "single" else ""
        schedule = self.schedule if self.kind == "pipelined" and self.chunks > 1 else ""
        return {"run": self.name, "schedule": schedule, "chunks": self.chunks, "split": split}


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of the sweep, then that of the best."""
    models = chosen.parts or list(CASES)
    rows, swept = [], []
    for model in models:
        case = (QUICK if chosen.quick else CASES)[model]
        configured(_overrides(case, Way("single")))  # downloads and prepares the data once, and not on both ranks
        contest = Contest(case)
        groups = contest.finals(chosen.rounds)
        for way, seconds in contest.swept.items():
            swept.append({"model": model, **way.columns(), "seconds a step": f"{statistics.median(seconds):.4f}"})
        rows += [{"model": model, **row} for row in final_rows(groups, case.batch)]
    measured = {model: {"rounds": chosen.rounds, **asdict(CASES[model])} for model in models}
    about = {"device": ranks.device_type(), "cores": ranks.cores(), "measured": measured}
    yield Table("pipelining_sweep", swept, about, draw_sweep)
    yield Table("pipelining", rows, about, draw_speed)


class Contest:
    """The contenders of one case. Only as many run at the same time as fit into memory.

    Attributes:
        case: The case.
        swept: Seconds of the steps of every way that was tried to find the best chunks.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.swept: dict[Way, list[float]] = {}
        self._first_loss: float | None = None

    def finals(self, rounds: int) -> list[dict[Way, list[float]]]:
        """Return the seconds of the best way of each kind, in groups; ``pipelined`` is in each."""
        ways = [Way("pipelined", chunks, schedule) for chunks in self.case.chunks for schedule in SCHEDULES]
        splits = ranks.run(layers_per_stage, self.case, ways)
        ways = [replace(way, balance=split) for way, split in zip(ways, splits, strict=True)]
        halves = next(way.balance for way in ways if SCHEDULES[way.schedule] == 1)
        single, naive = Way("single"), Way("pipelined", balance=halves)
        ours = self._best_of(ways)
        others = [replace(single, threads=ranks.RANKS)] if ranks.device_type() == "cpu" else []
        uniform = tuple(equal_stages([1.0] * sum(ours.balance), len(ours.balance)))
        if uniform != ours.balance:
            others.append(replace(ours, balance=uniform, uniform=True))
        groups = [[single, naive], others, [replace(way, precision="bf16") for way in (single, naive, ours)]]
        for peer in peers.NAMES:
            tries = [
                [Way(peer, chunks, balance=halves, tuned=tuned) for chunks in self.case.peer_chunks]
                for tuned in (False, True)
            ]
            groups.append([self._best_peer(ways) for ways in tries])
        return [self.in_turns([*group, ours], rounds) for group in groups if group]

    def _best_of(self, ways: list[Way]) -> Way:
        """The fastest; each is compared with the first, beside which it runs, as they differ by a few percent."""
        first, *others = ways
        times = {first: 1.0}
        for i in range(0, len(others), 3):
            measured = self.in_turns([first, *others[i : i + 3]], rounds=5)
            self.swept |= measured
            times |= {way: paired(measured, first, way) for way in measured}
        return min(times, key=times.__getitem__)

    def _best_peer(self, ways: list[Way]) -> Way:
        """One after the other: three that hold all of a batch's activations do not fit into memory at once."""
        for way in ways:
            self.swept |= self.in_turns([way], rounds=1)
        return min(ways, key=lambda way: self.swept[way])

    def in_turns(self, ways: list[Way], rounds: int) -> dict[Way, list[float]]:
        """Return the seconds of every way's steps.

        Raises:
            RuntimeError: If one starts from another loss than the others.
        """
        with ExitStack() as stack:
            workers = {way: stack.enter_context(closing(_start(way, self.case))) for way in ways}
            for way, worker in workers.items():
                self._check(way, worker.step(1))
            # The order of a planned schedule is fixed after some steps, of which the one above is the first.
            warm_up = MEASURED_STEPS - 1 if any(way.schedule == "planned" for way in ways) else 1
            seconds = take_turns({way: worker.step for way, worker in workers.items()}, rounds, warm_up)
        shown = (f"{w.name} x{w.chunks} {w.schedule}: {statistics.median(t):.3f} s" for w, t in seconds.items())
        print(", ".join(shown), file=sys.stderr, flush=True)
        return seconds

    def _check(self, way: Way, loss: float) -> None:
        """A coarse comparison: with BatchNorm, the loss depends on the number of chunks."""
        self._first_loss = self._first_loss or loss
        if not math.isclose(loss, self._first_loss, rel_tol=0.05):
            raise RuntimeError(f"{way} starts from loss {loss}, the others from {self._first_loss}: not the same model")


def layers_per_stage(rank: int, case: Case, ways: list[Way]) -> list[tuple[int, ...]]:
    """Return the number of layers of each stage for each of the ways, so that stages take the same time.

    The layers are measured on rank 0's core, with a micro-batch of medium size, while the other core is idle.
    """
    if rank != 0:
        return []
    chunks = case.chunks[len(case.chunks) // 2]
    setup = configured(_overrides(case, Way("single", chunks)))
    seconds = seconds_per_layer(setup.plan, setup.chain, setup.sample, setup.cfg.seed, threads=1)
    return [
        tuple(equal_stages(seconds, SCHEDULES[way.schedule] * ranks.RANKS, ranks.RANKS, way.chunks, way.schedule))
        for way in ways
    ]


def _start(way: Way, case: Case) -> ranks.Workers:
    """The contender's processes. A single process may use both cores if its library or its threads can."""
    if way.kind in peers.NAMES:
        return ranks.Workers(_peer, way, _overrides(case, Way("single")), all_cores=True, keep_memory=way.tuned)
    size = ranks.RANKS if way.kind == "pipelined" else 1
    place = {"size": size, "threads": way.threads, "all_cores": way.threads > 1}
    return ranks.Workers(Trainer.build, _overrides(case, way), **place)


def _peer(rank: int, way: Way, overrides: list[str]) -> peers.Peer:
    trainer = Trainer.build(rank, overrides)
    checkpoint = "never" if way.tuned else peers.DEFAULT_CHECKPOINT
    return peers.Peer(trainer, way.kind, way.balance, way.chunks, checkpoint)


def _overrides(case: Case, way: Way) -> list[str]:
    """The command line of one of this project's ways."""
    layout = ["parallel=single", f"parallel.chunks={way.chunks}"]
    if way.kind == "pipelined":
        split = ",".join(map(str, way.balance))
        layout = [
            "parallel=pipelined", "parallel.pp=2", f"parallel.chunks={way.chunks}",
            f"parallel.schedule={way.schedule}", f"parallel.balance=[{split}]",
            f"parallel.stages_per_rank={len(way.balance) // ranks.RANKS}",
        ]  # fmt: skip
    return [
        *case.overrides, *layout, f"train.global_batch_size={case.batch}", f"train.precision={way.precision}",
        f"device={ranks.device_type()}", "train.steps=1000000", "logger=none",
    ]  # fmt: skip


def final_rows(groups: list[dict[Way, list[float]]], batch: int) -> list[dict]:
    """Return the rows of the table: seconds, throughput, and how many times as fast ``pipelined`` is.

    Ratios are paired by the rounds of the group. ``pipelined`` itself has one row, that of the first group.
    """
    rows: dict[str, dict] = {}
    for group in groups:
        seconds = {way.name: times for way, times in group.items()}
        for way, times in group.items():
            spread = Spread.of(times)
            measured = {
                **way.columns(),
                **spread.columns(),
                "samples/s": f"{batch / spread.median:.2f}",
                "pipelined is faster by": f"{paired(seconds, 'pipelined', way.name):.2f}x",
            }
            rows.setdefault(way.name, measured)
    return list(rows.values())


# What ``pipelined`` is compared with. (The others of the table are variants of ``pipelined``.)
_CONTENDERS = ("single", "single, 2 threads", "torchgpipe, tuned", "fairscale, tuned", "torchgpipe", "fairscale")


def draw_speed(path: Path, rows: Sequence[Mapping]) -> None:
    """Draw how many times as fast ``pipelined`` is as each contender."""
    factors = {(row["model"], row["run"]): float(row["pipelined is faster by"].rstrip("x")) for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    shown = [run for run in _CONTENDERS if any((model, run) in factors for model in models)]
    with figure.drawing(path, width=9.0) as (axes,):
        for model, marker in zip(models, "osD^v<>", strict=False):
            points = [(factors[model, run], shown.index(run)) for run in shown if (model, run) in factors]
            axes.plot(*zip(*points, strict=True), marker, label=model, markersize=8)
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_yticks(range(len(shown)), shown)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel("how many times as fast parallel=pipelined is (1: equally fast)")
        axes.legend()


def draw_sweep(path: Path, swept: Sequence[Mapping]) -> None:
    """Draw the seconds per step over the number of chunks, one panel per model."""
    models = list(dict.fromkeys(row["model"] for row in swept))
    with figure.drawing(path, width=4.5 * len(models), mosaic=[models]) as axes:
        for model, panel in zip(models, axes, strict=True):
            curves: dict[str, list[tuple[float, float]]] = {}
            for row in swept:
                if row["model"] == model and row["run"].startswith("pipelined"):
                    curve = curves.setdefault(row["schedule"], [])
                    curve.append((float(row["chunks"]), float(row["seconds a step"])))
            for name, curve in curves.items():
                panel.plot(*zip(*sorted(curve), strict=True), "o-", label=name, linewidth=1.5)
            ticks = sorted({count for curve in curves.values() for count, _ in curve})
            panel.set_xscale("log", base=2)
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
            panel.set_ylim(0, 1.08 * max(seconds for curve in curves.values() for _, seconds in curve))
            panel.set(xlabel="chunks", ylabel="seconds a step", title=model)
            panel.legend(loc="lower left")


BENCHMARK = Benchmark(measure, rounds=7, parts=tuple(CASES), one_table=True)
