"""Pipelining on two cores (or two GPUs): this project, torchgpipe, fairscale, and doing without, in one run.

    pip install --no-deps -r benchmarks/requirements.txt
    python -m benchmarks.pipelining [--models resnet50 transformer] [--rounds 7] [--quick]

Every way of running has processes of its own, each on a core, one thread each. First it is swept over its chunk counts;
then the best of each take turns with ``pipelined``, a few at a time, and the table has the median, fastest and slowest.
Everything of a step is in its time: forward, backward, exchange and the update (plain SGD), in fp32 unless it says
bf16, ResNet-50 with the published experiment's batch and in both memory formats, the same for all. Every contender
starts from the same weights: the first step's losses must agree, or the benchmark ends.

single               one process, one thread
single, 2 threads    one process that has both cores, two threads in every operation: no pipeline at all
naive                model parallel: two stages on two ranks, the whole batch as one chunk
pipelined            this project, best schedule and chunks, stages of equal time (parallel.balance=time)
pipelined, uniform   the same with as many layers in each stage
torchgpipe           as it comes: two partitions in one process, which has both cores; all but the last micro-batch
                     recompute their activations, the library's default; the C library's allocator; best chunks
torchgpipe, tuned    with what this project does: no recomputation, freed memory kept (parallel.devices); best chunks
fairscale            likewise, as it comes and tuned
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import asdict, dataclass, replace

from benchmarks import figure, peers, ranks, table
from benchmarks.timing import Spread, paired, take_turns
from benchmarks.trainer import TRANSFORMER, Trainer, configured
from parallel.balance import equal_stages, seconds_per_layer
from parallel.pipeline import MEASURED_STEPS


@dataclass(frozen=True)
class Case:
    """A model at one batch, and the chunk counts that are tried."""

    overrides: tuple[str, ...]
    batch: int
    chunks: tuple[int, ...]
    peer_chunks: tuple[int, ...]


_TRANSFORMER = (*TRANSFORMER, "model.dropout=0")  # drawn anew for each micro-batch here, for each partition elsewhere
CASES = {
    "resnet50": Case(("model=resnet50", "data.image_size=128"), 120, (3, 4, 6), (1, 2, 6)),
    "resnet50, contiguous": Case(
        ("model=resnet50", "data.image_size=128", "model.channels_last=false"), 120, (3, 4, 6), (1, 2, 6)
    ),
    "transformer": Case(_TRANSFORMER, 16, (2, 4, 8, 16), (1, 2, 4)),
}
QUICK = {
    "resnet50": Case(("model=resnet50", "data.image_size=64"), 8, (2, 4), (1, 4)),
    "resnet50, contiguous": Case(
        ("model=resnet50", "data.image_size=64", "model.channels_last=false"), 8, (2, 4), (1, 4)
    ),
    "transformer": Case((*_TRANSFORMER, "model.d_model=32", "data.seq_len=16"), 8, (2, 4), (1, 2)),
}


# Stages a rank; gpipe's steps take as long as 1f1b's.
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "planned": 2}


@dataclass(frozen=True)
class Way:
    """A way of running a case. ``kind``: single | pipelined | torchgpipe | fairscale."""

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
        """By what this is known in tables."""
        if self.kind == "single":
            return self._in_precision("single" if self.threads == 1 else f"single, {self.threads} threads")
        if self.kind == "pipelined":
            name = "naive" if self.chunks == 1 else "pipelined"
            name += ", uniform" * self.uniform
            return self._in_precision(name)
        return f"{self.kind}, tuned" if self.tuned else self.kind

    def _in_precision(self, name: str) -> str:
        return name if self.precision == "fp32" else f"{name}, {self.precision}"

    def columns(self) -> dict[str, object]:
        """How it ran, as columns of a table."""
        split = "+".join(map(str, self.balance)) if self.kind != "single" else ""
        schedule = self.schedule if self.kind == "pipelined" and self.chunks > 1 else ""
        return {"run": self.name, "schedule": schedule, "chunks": self.chunks, "split": split}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    chosen = options.parse_args()
    rows, swept = [], []
    for model in chosen.models:
        case = (QUICK if chosen.quick else CASES)[model]
        configured(_overrides(case, Way("single")))  # downloads, tokens: once, and not on both ranks
        contest = Contest(case)
        groups = contest.finals(1 if chosen.quick else chosen.rounds)
        swept += [{"model": model, **row} for row in sweep_rows(contest.swept)]
        rows += [{"model": model, **row} for row in final_rows(groups, case.batch)]
    print(table.markdown(rows))
    measured = {model: {"rounds": chosen.rounds, **asdict(CASES[model])} for model in chosen.models}
    if not chosen.quick:  # the others keep what was measured before
        rows, swept = _with_the_others(rows, "pipelining"), _with_the_others(swept, "pipelining_sweep")
        measured = {**table.facts("pipelining")["measured"], **measured}
    about = {"device": ranks.device_type(), "cores": ranks.cores()[: ranks.RANKS], "measured": measured}
    table.write("pipelining_sweep", swept, chosen.quick, **about)
    path = table.write("pipelining", rows, chosen.quick, **about)
    print(f"written to {path} and {figure.pipelining(path.with_suffix('.png'), rows, swept)}")


def _with_the_others(rows: list[dict], name: str) -> list[dict]:
    """The rows, and the table's own of models that they do not speak of, in the order of CASES."""
    anew = {row["model"] for row in rows}
    kept = [row for row in table.read(name) if row["model"] not in anew]
    return sorted(kept + rows, key=lambda row: list(CASES).index(row["model"]))


class Contest:
    """The ways of running one case, each in processes of its own, a few at a time, as many as fit into memory."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.swept: dict[Way, list[float]] = {}
        self._first_loss: float | None = None

    def finals(self, rounds: int) -> list[dict[Way, list[float]]]:
        """Seconds of the best way of each kind, in groups; ``pipelined`` is in each."""
        ways = [Way("pipelined", chunks, schedule) for chunks in self.case.chunks for schedule in SCHEDULES]
        splits = ranks.run("benchmarks.pipelining:splits", asdict(self.case), [asdict(way) for way in ways])
        ways = [replace(way, balance=tuple(split)) for way, split in zip(ways, splits, strict=True)]
        halves = next(way.balance for way in ways if SCHEDULES[way.schedule] == 1)
        naive = Way("pipelined", balance=halves)
        ours = self._best_of(ways)
        groups = [[Way("single"), naive]]
        also = []
        if ranks.device_type() == "cpu":
            also.append(Way("single", threads=ranks.RANKS))
        uniform = tuple(equal_stages([1.0] * sum(ours.balance), len(ours.balance)))
        if uniform != ours.balance:
            also.append(replace(ours, balance=uniform, uniform=True))
        if also:
            groups.append(also)
        groups.append([replace(way, precision="bf16") for way in (Way("single"), naive, ours)])
        for peer in peers.NAMES:
            groups.append(
                [
                    self._best_peer([Way(peer, n, balance=halves, tuned=tuned) for n in self.case.peer_chunks])
                    for tuned in (False, True)
                ]
            )
        return [self.in_turns([*group, ours], rounds) for group in groups]

    def _best_of(self, ways: list[Way]) -> Way:
        """The fastest of ways a few percent apart: judged against the first, beside which each of them runs."""
        first, *others = ways
        speeds = {first: 1.0}
        for i in range(0, len(others), 3):
            measured = self.in_turns([first, *others[i : i + 3]], rounds=5)
            self.swept |= measured
            speeds |= {way: paired(measured, way, first) for way in measured}
        return max(speeds, key=speeds.__getitem__)

    def _best_peer(self, ways: list[Way]) -> Way:
        """One after the other: three that hold all of a batch's activations would not fit into memory at once."""
        for way in ways:
            self.swept |= self.in_turns([way], rounds=1)
        return min(ways, key=lambda way: self.swept[way])

    def in_turns(self, ways: list[Way], rounds: int) -> dict[Way, list[float]]:
        """Seconds of every way's steps, after one step of each that builds what is kept, and those that warm up. Raises
        RuntimeError where one starts from another loss than the others."""
        contenders = {way: _start(way, self.case) for way in ways}
        for way, contender in contenders.items():
            self._check(way, contender.step(1))
        # A planned order is settled after some steps, the one above among them.
        warm_up = MEASURED_STEPS - 1 if any(way.schedule == "planned" for way in ways) else 1
        seconds = take_turns({way: contender.step for way, contender in contenders.items()}, rounds, warm_up)
        for contender in contenders.values():
            contender.close()
        shown = (f"{w.name} x{w.chunks} {w.schedule}: {statistics.median(t):.3f} s" for w, t in seconds.items())
        print(", ".join(shown), file=sys.stderr, flush=True)
        return seconds

    def _check(self, way: Way, loss: float) -> None:
        """BatchNorm makes the loss depend on the chunks, so ways are compared up to that: coarsely."""
        self._first_loss = self._first_loss or loss
        if not math.isclose(loss, self._first_loss, rel_tol=0.05):
            raise RuntimeError(f"{way} starts from loss {loss}, the others from {self._first_loss}: not the same model")


def splits(rank: int, case: dict, ways: list[dict]) -> list[list[int]]:
    """Layers of each stage, for each of the ways: by their time for a micro-batch of middling size on rank 0's core
    while the other core rests."""
    if rank != 0:
        return []
    case = Case(**case)
    chunks = case.chunks[len(case.chunks) // 2]
    setup = configured(_overrides(case, Way("single", chunks)))
    seconds = seconds_per_layer(setup.plan, setup.chain, setup.sample, setup.cfg.seed, threads=1)
    return [
        equal_stages(seconds, SCHEDULES[way.schedule] * ranks.RANKS, ranks.RANKS, way.chunks, way.schedule)
        for way in (Way(**way) for way in ways)
    ]


def _start(way: Way, case: Case) -> ranks.Apart:
    """The contender. One in a single process may use both cores where its library or its threads can."""
    if way.kind in peers.NAMES:
        return ranks.Apart(_peer, asdict(way), asdict(case), wide=True, kept=way.tuned)
    size = ranks.RANKS if way.kind == "pipelined" else 1
    return ranks.Apart(_trainer, _overrides(case, way), size=size, threads=way.threads, wide=way.threads > 1)


class _Steps:
    """A trainer whose step is its loss."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def step(self, number: int) -> float:
        return self._trainer.step(number).loss


def _trainer(rank: int, overrides: list[str]) -> _Steps:
    return _Steps(Trainer(configured(overrides), rank))


def _peer(rank: int, way: dict, case: dict) -> peers.Peer:
    way, case = Way(**way), Case(**case)
    trainer = Trainer(configured(_overrides(case, Way("single"))))
    cfg, chain = trainer.setup.cfg, trainer.setup.chain
    checkpoint = "never" if way.tuned else peers.DEFAULT_CHECKPOINT
    return peers.Peer(
        way.kind, chain, trainer.batch, way.balance, way.chunks, cfg.seed, cfg.optim.lr, ranks.device_type(), checkpoint
    )


def _overrides(case: Case, way: Way) -> list[str]:
    """The command line of a way of this project."""
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


def sweep_rows(swept: dict[Way, list[float]]) -> list[dict]:
    """Rows of the sweep's table: every way and its median."""
    return [{**way.columns(), "seconds a step": f"{statistics.median(times):.4f}"} for way, times in swept.items()]


def final_rows(groups: list[dict[Way, list[float]]], batch: int) -> list[dict]:
    """Rows of the table: seconds, throughput, and how many times as fast ``pipelined`` is as each, paired by the rounds
    of their group. ``pipelined`` itself has one row, of the first group."""
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


if __name__ == "__main__":
    main()
