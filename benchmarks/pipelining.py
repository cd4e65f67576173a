"""Pipelining on two cores (or two GPUs): this project, torchgpipe, fairscale, and doing without, in one run.

    pip install --no-deps -r benchmarks/requirements.txt
    python -m benchmarks.pipelining [--models resnet50 transformer] [--rounds 7] [--quick]

Two processes stay for the whole run, each on a core of its own, one thread each. First every way of running is swept
over its chunk counts; then the best of each take turns, and the table has the median, fastest and slowest of them.
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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from benchmarks import figure, peers, ranks, table
from benchmarks.timing import Spread, paired, take_turns
from benchmarks.trainer import TRANSFORMER, Trainer, configured
from parallel.balance import equal_stages, seconds_per_layer


@dataclass(frozen=True)
class Case:
    """A model at one batch, and the chunk counts that are tried."""

    overrides: tuple[str, ...]
    batch: int
    chunks: tuple[int, ...]
    peer_chunks: tuple[int, ...]


_TRANSFORMER = (*TRANSFORMER, "model.dropout=0")  # drawn anew for each micro-batch here, for each partition elsewhere
CASES = {
    "resnet50": Case(("model=resnet50", "data.image_size=128"), 120, (6, 8, 10), (1, 2, 6)),
    "resnet50, contiguous": Case(
        ("model=resnet50", "data.image_size=128", "model.channels_last=false"), 120, (6, 8, 10), (1, 2, 6)
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


SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2}  # stages a rank; gpipe's steps take as long as 1f1b's


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
            return self._in_precision(f"{name}, uniform" if self.uniform else name)
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
        found = ranks.run("benchmarks.pipelining:contest", model, asdict(case), 1 if chosen.quick else chosen.rounds)
        swept += [{"model": model, **row} for row in found["sweep"]]
        rows += [{"model": model, **row} for row in compare(found["final"], case.batch)]
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


def contest(rank: int, model: str, case: dict, rounds: int) -> dict | None:
    """Both ranks' part: the sweep, then the best of each kind in turns."""
    case = Case(**case)
    arena = Arena(case, rank)
    splits = arena.splits()
    split = splits[1]
    swept: list[tuple[Way, list[float]]] = []

    def best_of(ways: list[Way], rounds: int = 1) -> Way:
        measured = arena.in_turns(ways, rounds)
        swept.extend(measured.items())
        return min(ways, key=lambda way: statistics.median(measured[way]))

    # More rounds than for the peers: these lie within a few percent of each other.
    ours = best_of([Way("pipelined", c, s, splits[v]) for s, v in SCHEDULES.items() for c in case.chunks], rounds=3)
    finalists = [Way("single"), Way("pipelined", balance=split), ours]
    finalists += [replace(way, precision="bf16") for way in finalists]
    uniform = tuple(equal_stages([1.0] * sum(ours.balance), len(ours.balance)))
    if uniform != ours.balance:
        finalists.append(replace(ours, balance=uniform, uniform=True))
    if ranks.device_type() == "cpu":
        finalists.insert(1, Way("single", threads=ranks.RANKS))
    for peer in peers.NAMES:
        for tuned in (False, True):
            finalists.append(best_of([Way(peer, n, balance=split, tuned=tuned) for n in case.peer_chunks]))
    seconds = arena.in_turns(finalists, rounds)
    if rank != 0:
        return None
    return {
        "sweep": [{**way.columns(), "seconds a step": f"{statistics.median(times):.4f}"} for way, times in swept],
        "final": [{"way": asdict(way), "seconds": seconds[way]} for way in finalists],
    }


class Arena:
    """Builds contenders on both ranks and times them. Rank 0 says which won, so that both go on with the same."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.first_loss: float | None = None

    def splits(self) -> dict[int, tuple[int, ...]]:
        """Layers of each stage, for each number of stages a rank: by their time for a micro-batch on rank 0's core
        while the other core rests."""
        found: list = [None]
        if self.rank == 0:
            chunks = self.case.chunks[len(self.case.chunks) // 2]
            setup = configured(_overrides(self.case, Way("single", chunks)))
            seconds = seconds_per_layer(setup.plan, setup.chain, setup.sample, setup.cfg.seed, threads=1)
            found = [{v: tuple(equal_stages(seconds, v * ranks.RANKS)) for v in SCHEDULES.values()}]
        dist.broadcast_object_list(found)
        return found[0]

    def in_turns(self, ways: list[Way], rounds: int) -> dict[Way, list[float]]:
        """Seconds of every way's steps, taken in turns, after one step of each that builds what is kept, and one that
        warms up; rank 0's measurements on both ranks."""
        contenders = {way: _Contender(way, self.case, self.rank) for way in ways}
        for way, contender in contenders.items():
            self._check(way, contender.step(1))
        seconds = [take_turns({w: c.step for w, c in contenders.items()}, rounds, meet=dist.barrier)]
        dist.broadcast_object_list(seconds)
        for contender in contenders.values():
            contender.close()
        if self.rank == 0:
            medians = {way: statistics.median(times) for way, times in seconds[0].items()}
            shown = ", ".join(f"{w.name} x{w.chunks} {w.schedule}: {t:.3f} s" for w, t in medians.items())
            print(shown, file=sys.stderr, flush=True)
        return seconds[0]

    def _check(self, way: Way, loss: float | None) -> None:
        """BatchNorm makes the loss depend on the chunks, so ways are compared up to that: coarsely."""
        if self.rank != 0 or loss is None:
            return
        self.first_loss = loss if self.first_loss is None else self.first_loss
        if not math.isclose(loss, self.first_loss, rel_tol=0.05):
            raise RuntimeError(f"{way} starts from loss {loss}, the others from {self.first_loss}: not the same model")


class _Contender:
    """One way, on this rank: nothing where the other rank does all of it."""

    def __init__(self, way: Way, case: Case, rank: int) -> None:
        self._way, self._rank, self._run = way, rank, None
        if way.kind != "pipelined" and rank != 0:
            return
        with self._cores():
            if way.kind not in peers.NAMES:
                self._run = Trainer(configured(_overrides(case, way)), rank)
            elif way.tuned:
                self._run = _peer(way, case)
            else:
                self._run = ranks.Apart(_peer, way, case)

    @contextmanager
    def _cores(self) -> Iterator[None]:
        """A contender in one process has both cores; with one thread in an operation, unless it asks for more."""
        wide = self._way.kind in peers.NAMES or self._way.threads > 1
        with ranks.on_all_cores(self._rank, self._way.threads) if wide else nullcontext():
            yield

    def step(self, number: int) -> float | None:
        if self._run is None:
            return None
        with self._cores():
            found = self._run.step(number)
        return found if isinstance(found, float) else found.loss

    def close(self) -> None:
        if self._run is not None:
            self._run.close()


def _peer(way: Way, case: Case) -> peers.Peer:
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


def compare(final: list[dict], batch: int) -> list[dict]:
    """Rows of the table: seconds, throughput, and how many times as fast ``pipelined`` is as each (paired by round)."""
    seconds = {Way(**one["way"]).name: one["seconds"] for one in final}
    rows = []
    for one in final:
        way = Way(**one["way"])
        spread = Spread.of(one["seconds"])
        rows.append(
            {
                **way.columns(),
                **spread.columns(),
                "samples/s": f"{batch / spread.median:.2f}",
                "pipelined is faster by": f"{paired(seconds, 'pipelined', way.name):.2f}x",
            }
        )
    return rows


if __name__ == "__main__":
    main()
