"""``mode=plan parallel=auto cluster=NAME``: the best layouts on a cluster that is only described."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import PlanError
from conf import COMMAND
from conf.instantiate import to_dict
from data.dataset import Batch
from planner.cluster import Cluster, read_cluster
from planner.costs import PaperCosts
from planner.search import FREE, Candidate, Found, search
from planner.simulation import simulate
from planner.step import Seconds, Works, stage_seconds
from planner.work import work_of
from training.reporting.console import columns
from training.setup import model_and_data

_SHOWN = 10
_PICTURE, _DRAWN_RANKS, _DRAWN_CHUNKS = "predicted_timeline.png", 16, 64
_PAPER = "bf16"  # the precision on paper of train.precision=auto


def plan_on_paper(cfg: Any, run_dir: Path, words: Sequence[str] = ()) -> str:
    """Return the text that shows which layouts are best, and why others are not; draw the best pipeline's timeline.

    Args:
        cfg: The configuration.
        run_dir: Where the picture goes.
        words: The command line, for the commands to copy.

    Raises:
        PlanError: There is no cluster, a number of it is impossible, or nothing fits.
    """
    if cfg.cluster is None:
        raise PlanError("parallel=auto on paper needs a cluster: cluster=NAME of conf/cluster, such as cluster=a100x64")
    began = time.perf_counter()
    cluster, precision = read_cluster(to_dict(cfg.cluster)), cfg.train.precision
    precision = _PAPER if precision == "auto" else precision
    if precision not in cluster.peak:
        known = ", ".join(cluster.peak)
        raise PlanError(f"cluster={cfg.cluster.name} says no peak for train.precision={precision}; it has {known}")
    works, tokens, feels = works_of(cfg, precision)
    typed = {key.partition(".")[2] for key in cfg.get(COMMAND, {}).get("typed", ())}
    fixed = {key: cfg.parallel[key] for key in FREE if key in typed and cfg.parallel.get(key) is not None}
    costs, batch = PaperCosts(cluster, precision), cfg.train.global_batch_size
    found = search(
        works, costs, batch, cluster.size, cluster.memory, cluster.reserved,
        tensor=any(work.attention for work in works), fixed=fixed,
    )  # fmt: skip
    own = [w for w in words if w.partition("=")[0].partition(".")[0] not in ("mode", "parallel", "cluster")]
    about = _about(cfg, works, cluster, precision, found, time.perf_counter() - began, feels)
    drawn = _draw(found, works, costs, cfg, run_dir)
    return "\n".join([*about, *_tables(found, works, cluster, precision, batch, tokens, own), *drawn])


def works_of(cfg: Any, precision: str) -> tuple[Works, int | None, bool]:
    """Return the work of the model's layers for one sample, a sample's tokens, and whether it has BatchNorm."""
    chain, data = model_and_data(cfg)
    data.prepare()
    feels = any(isinstance(module, _BatchNorm) for module in chain.skeleton().modules())
    indices = np.arange(1 + feels) % len(data.train)  # BatchNorm takes no single number
    return work_of(chain, Batch(*data.train.read(indices, 0)), precision), data.seq_len, feels


def _about(
    cfg: Any, works: Works, cluster: Cluster, precision: str, found: Found, seconds: float, feels: bool
) -> Iterator[str]:
    parameters = sum(work.parameters for work in works)
    yield (
        f"{cfg.model.name}: {parameters:,} parameters (a tied one counted twice), {precision}, "
        f"{cfg.train.global_batch_size:,} samples a step"
    )
    yield (
        f"cluster={cfg.cluster.name}: {cluster.size:,} x {cluster.device}, {cluster.devices} in a node; efficiencies: "
        f"{cluster.source}"
    )
    yield f"{found.tried:,} layouts in {seconds:.1f} s, of which {len(found.best):,} fit; seconds of a step:"
    yield ""
    if feels:
        one = found.best[0].layout
        yield (
            f"BatchNorm normalizes by the micro-batch: the best layout's {one.samples} samples give the numbers of "
            f"parallel=single parallel.chunks={one.dp * one.chunks}"
        )
        yield ""


def _tables(
    found: Found, works: Works, cluster: Cluster, precision: str, batch: int, tokens: int | None, own: Sequence[str]
) -> Iterator[str]:
    flops = 3 * batch * sum(work.flops + work.attention for work in works)
    parts = [part.name for part in fields(Seconds) if any(getattr(c.seconds, part.name) for c in found.best)]
    limit = f"GiB of {cluster.memory / 2**30:.0f}"
    head = ["", "layout", "total", *parts, limit, "tokens/s" if tokens else "samples/s", "MFU"]

    def row(name: str, one: Candidate) -> list[str]:
        total = one.seconds.total
        used = flops / total / (one.layout.ranks * cluster.peak[precision])
        speed = f"{batch * (tokens or 1) / total:,.0f}"
        shown = [f"{getattr(one.seconds, part):.3g}" for part in parts]
        return [name, _short(one), f"{total:.3g}", *shown, f"{one.memory.total / 2**30:.1f}", speed, f"{used:.0%}"]

    best = {}
    for one in found.best:
        best.setdefault(one.layout.strategy, one)
    rows = [row(str(place), one) for place, one in enumerate(found.best[:_SHOWN], 1)]
    yield columns([head, *rows, *(row("best", one) for one in best.values())])
    yield ""
    for name, one in found.nearest.items():
        needed, there = (size / 2**30 for size in (one.memory.total, cluster.memory))
        yield f"{name} does not fit: {needed:.1f} GiB of {there:.1f} at the least ({_short(one)})"
    if found.best[0].layout.tp > 1:
        yield "tp, tensor parallelism, is planned on paper only: nothing here trains with it"
    runs = {}
    for one in found.best:
        if one.layout.tp == 1:
            runs.setdefault(one.layout.strategy, one)
    yield "to copy, the best of each strategy that can be run, the fastest first:"
    yield from (f"  {shlex.join(['python', 'train.py', *own, *one.words])}" for one in runs.values())
    yield "such predictions were 3 to 10 % off on average in six tables of measured layouts: docs/planner.md"


def _draw(found: Found, works: Works, costs: PaperCosts, cfg: Any, run_dir: Path) -> Iterator[str]:
    """Draw when each rank of the best pipeline works, where it is small enough to be seen."""
    for one in (candidate.layout for candidate in found.best):
        if 1 < one.pp <= _DRAWN_RANKS and one.chunks * one.per_rank <= _DRAWN_CHUNKS:
            from training.reporting.timeline import draw

            ranks = simulate(stage_seconds(works, one, costs), one.pp, one.chunks, one.schedule, 0.0)
            layout = f"{one.schedule}, {one.pp} ranks, {one.chunks} micro-batches of {one.samples}"
            draw(ranks, f"{cfg.model.name}, predicted for {cfg.cluster.name}", layout).savefig(run_dir / _PICTURE)
            yield f"the best pipeline's timeline, as predicted: {run_dir / _PICTURE}"
            return


def _short(one: Candidate) -> str:
    """A layout in a few words."""
    laid = one.layout
    words = [laid.strategy, *(f"{key}={getattr(laid, key)}" for key in ("dp", "tp", "pp") if getattr(laid, key) > 1)]
    words += [laid.schedule] if laid.pp > 1 else []
    words += [f"x{laid.per_rank}"] if laid.per_rank > 1 else []
    return " ".join([*words, f"chunks={laid.chunks}", *["recompute"] * (laid.recompute == "full")])
