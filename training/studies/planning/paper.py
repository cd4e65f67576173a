"""``parallel=auto`` for a described cluster: predictions of its best layouts; also the tables of any search."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from common.errors import PlanError
from conf.instantiate import to_dict
from conf.schema import Root
from models.given import given_objects
from parallel.actions import StageSeconds
from parallel.devices import parameter_dtype
from parallel.layout import Layout
from parallel.planning import make_plan
from parallel.strategies import strategy_info
from planner.cluster import Cluster, read_cluster
from planner.costs import PaperCosts
from planner.memory import Allocation
from planner.search import FREE, Candidate, Devices, Found, Pool, search
from planner.simulation import Intervals, duration, simulate
from planner.step import Seconds, slowed, stage_seconds
from training.callbacks.averaging import states_of_run
from training.optimizer.checks import check_others
from training.reporting.console import call_of, columns
from training.run.checks.layers import check_examined
from training.run.prepare import checked_model_and_data, in_one_process
from training.run.setup import Setup
from training.studies.planning import AUTO
from training.studies.planning.typed import fixed_of, possible_layouts

HERE = "here"  # the value of cluster= for this machine, which is measured
# Mean errors over tables of measured layouts (benchmarks/planner.py): with the cluster's file, and with a guessed
# network and a device that was not fitted to the table.
_FITTED_IS_OFF = (
    "such predictions were 2 to 7 % off on average in six tables of measured layouts that devices were fitted to, and "
    "9 and 15 % in two that were only compared"
)
_GUESS_IS_OFF = (
    "some numbers of this cluster are guesses: such predictions were 2 to 8 % off on average in six tables that "
    "were left out, and by up to 16 % for nine layouts in ten"
)
_WHERE = "docs/planner.md has the tables, and how to measure a network"
_MEMORY_IS_OFF = 0.1  # layouts that fit with less to spare are named; see the table of memory in docs/planner.md
_SHOWN = 10
_PICTURE, _DRAWN_RANKS, _DRAWN_CHUNKS = "predicted_timeline.png", 16, 64
# Keys that the words of a layout set.
_OF_LAYOUT = ("parallel", *(f"parallel.{key}" for key in (*FREE, *Layout.OPTIONS)))
_NOT_COPIED = ("mode", "cluster", "hydra")  # sections that the copied commands leave out
_PAPER = "bf16"  # the precision that train.precision=auto means on paper


def plan_on_paper(cfg: Root, run_dir: Path, words: Sequence[str] = ()) -> str:
    """Return tables of the best layouts and of layouts that do not fit, and draw the timeline of the best pipeline.

    Args:
        cfg: The configuration.
        run_dir: The run directory, where the picture is written.
        words: The command line, for the commands to copy.

    Raises:
        PlanError: If a number of the cluster is impossible, or no layout fits.
    """
    began = time.perf_counter()
    found, setup = predict_on_paper(cfg)
    cluster, precision = cluster_of(cfg)
    (layers, _), tokens = setup.work, setup.data.seq_len
    twice = " (a tied one counted twice)" if any(work.ties for work in layers) else ""
    about = [
        f"{cfg.model.name}: {sum(work.parameters for work in layers):,} parameters{twice}, {precision}, "
        f"global batch {cfg.train.global_batch_size:,}" + (f" x {tokens:,} tokens" if tokens else ""),
        f"cluster={cfg.cluster.name}: {cluster.size:,} x {cluster.device}, {cluster.devices} in a node; efficiencies: "
        f"{cluster.source}",
        f"{found.tried:,} layouts in {time.perf_counter() - began:.1f} s, of which {len(found.best):,} fit",
    ]
    told = batchnorm_of(found.best[0], setup)
    shown = tables(found, setup, words, cluster)
    return "\n".join([*about, *shown, *paper_is_off(cluster, found), *told, *_draw(found, cfg, run_dir)])


def paper_is_off(cluster: Cluster, found: Found) -> list[str]:
    """Return lines about the errors of predictions for a cluster, and about layouts that may not fit after all."""
    best = found.best[:_SHOWN]
    tight = [n for n, one in enumerate(best, 1) if one.memory.total > (1 - _MEMORY_IS_OFF) * one.devices.memory]
    warning = (
        f"{len(tight)} of the best {len(best)} layouts ({', '.join(map(str, tight))}) need more than "
        f"{100 * (1 - _MEMORY_IS_OFF):.0f} % of a device's memory, and predictions of memory are that far off: "
        "try them with two steps first"
    )
    off = _GUESS_IS_OFF if cluster.guess else _FITTED_IS_OFF
    return [f"{off}; {_WHERE}"] + [warning] * bool(tight)


def predict_on_paper(cfg: Root) -> tuple[Found, Setup]:
    """Predict every layout on the configuration's cluster.

    Raises:
        PlanError: See ``plan_on_paper``.
    """
    cluster, precision = cluster_of(cfg)
    fixed, (cfg, chain, data) = fixed_of(cfg), checked_model_and_data(cfg)
    check_others(to_dict(cfg.optim), chain)
    data.prepare()
    alone, batch = in_one_process(cfg).parallel, cfg.train.global_batch_size
    plan = make_plan(alone, chain, global_batch_size=batch, device="cpu", precision=precision)
    setup = Setup(cfg, chain, data, plan)
    check_examined(setup)
    pool = Pool(cluster.devices, cluster.size, on_job(cfg))
    possible = possible_layouts(setup, [pool], fixed, cluster.devices)
    costs, states = PaperCosts(cluster, precision), states_of_run(cfg, chain)
    number = parameter_dtype(precision).itemsize
    allocation = Allocation(number, costs.gathered, cluster.reserved, costs.itemsize)
    devices = Devices(costs, cluster.size, cluster.memory, allocation, states)
    return search(setup.work[0], [(devices, possible[pool])]), setup


def on_paper(cfg: Root) -> bool:
    """Return whether a configuration names a described cluster."""
    return cfg.cluster is not None and cfg.cluster.name != HERE


def on_job(cfg: Root) -> bool:
    """Return whether the run will be a job of a queue."""
    return cfg.launcher.name == "slurm"


def cluster_of(cfg: Root) -> tuple[Cluster, str]:
    """Return the configuration's cluster, with the number of nodes of a job, and the precision on the cluster.

    Raises:
        PlanError: If a number of the cluster is impossible, or the cluster has no peak for the precision.
    """
    cluster, precision = read_cluster(to_dict(cfg.cluster)), cfg.train.precision
    precision = _PAPER if precision == "auto" else precision
    if precision not in cluster.peak:
        known = ", ".join(cluster.peak)
        raise PlanError(f"cluster={cfg.cluster.name} says no peak for train.precision={precision}; it has {known}")
    if on_job(cfg):
        launcher = cfg.launcher
        devices = launcher.tasks_per_node or launcher.gpus_per_node or cluster.devices
        cluster = replace(cluster, nodes=launcher.nodes, devices=devices)
    return cluster, precision


def check_cluster(cfg: Root) -> None:
    """Check that a described cluster is typed only if a layout is planned for it. Raises PlanError."""
    if on_paper(cfg) and not (cfg.parallel.name == AUTO and (cfg.mode == "plan" or on_job(cfg))):
        raise PlanError(
            f"cluster={cfg.cluster.name} is for parallel=auto with mode=plan or launcher=slurm: type "
            "parallel=auto, and the parts of the layout that you want, such as parallel.dp=2; or leave cluster= out"
        )


def tables(found: Found, setup: Setup, words: Sequence[str], cluster: Cluster | None = None) -> Iterator[str]:
    """Yield the best ten layouts, each strategy's best layout, the reasons why others do not fit, and commands to copy.

    Args:
        found: The result of a search.
        setup: The run.
        words: The command line.
        cluster: A described cluster, for the column MFU and for the commands of its queue; None for this machine.
    """
    peak = cluster and cluster.peak[setup.plan.precision]
    for_job = cluster is not None and cluster.nodes > 1 and not on_job(setup.cfg)
    parts = [part.name for part in fields(Seconds) if any(getattr(c.seconds, part.name) for c in found.best)]
    best = best_of_each(found)
    named = [*enumerate(found.best[:_SHOWN], 1), *(("best", candidate) for candidate in best.values())]
    batch, tokens, rows = setup.cfg.train.global_batch_size, setup.data.seq_len, []
    flops = 3 * batch * sum(work.flops + work.attention - work.masked for work in setup.work[0])
    for name, candidate in named:
        total, processes, devices = candidate.seconds.total, candidate.layout.processes, candidate.devices
        row = {"": str(name), "layout": candidate.name, "idle": str(devices.count - processes), "total": f"{total:.3g}"}
        row |= {part: f"{getattr(candidate.seconds, part):.3g}" for part in parts}
        row |= {"GiB": f"{candidate.memory.total / 2**30:.3g}", "of": f"{devices.memory / 2**30:.3g}"}
        row["tokens/s" if tokens else "samples/s"] = f"{batch * (tokens or 1) / total:,.0f}"
        if peak is not None:
            row["MFU"] = f"{flops / total / (processes * peak):.0%}"
        rows.append(row)
    head = [key for key in rows[0] if key != "idle" or any(row["idle"] != "0" for row in rows)]
    yield "seconds of a step:"
    yield ""
    yield columns([head, *([row[key] for key in head] for row in rows)])
    yield ""
    if peak is not None and (uncounted := sorted({name for work in setup.work[0] for name in work.uncounted})):
        yield f"no FLOP formula for {', '.join(uncounted)}: counted as 0"
    for name, candidate in found.nearest.items():
        needed, there = (size / 2**30 for size in (candidate.memory.total, candidate.devices.memory))
        yield f"{name} does not fit: {needed:.1f} GiB of {there:.1f} at the least ({candidate.name})"
    without = " (without SLURM, start ranks with torchrun: docs/cluster.md)" * for_job
    yield f"to copy, the best of each strategy, the fastest first{without}:"
    for candidate in best.values():
        nodes, processes = candidate.layout.nodes, candidate.layout.processes
        job = ["launcher=slurm", f"launcher.nodes={nodes}"] * for_job
        gpus = for_job and setup.cfg.device != "cpu"  # a job gets no GPUs by default
        job += [f"launcher.gpus_per_node={processes // nodes}"] * gpus
        yield f"  {command(words, candidate, job)}"


def batchnorm_of(candidate: Candidate, setup: Setup) -> list[str]:
    """Return a line with the one-process layout that has the same micro-batches, if the model has BatchNorm."""
    layout, together = candidate.layout, candidate.layout.dp if setup.cfg.parallel.sync_batchnorm else 1
    samples, chunks = layout.samples * together, layout.chunks * layout.dp // together
    return [
        f"BatchNorm normalizes by the micro-batch: {candidate.name} has {samples} samples in each, as "
        f"parallel=single parallel.chunks={chunks}"
    ] * setup.has_batchnorm


def best_of_each(found: Found) -> dict[str, Candidate]:
    """Return the fastest layout of each strategy, the fastest first."""
    best = {}
    for candidate in found.best:
        best.setdefault(candidate.layout.strategy, candidate)
    return best


def command(words: Sequence[str], candidate: Candidate, more: Sequence[str] = ()) -> str:
    """Return the typed command, or the call of a Python program, changed to train in a candidate's layout."""
    said = {*_OF_LAYOUT}
    if strategy_info(candidate.layout.strategy).several_devices:
        said.remove("parallel.pp")  # the stages of a single process are typed, not predicted
    keys = {word: word.partition("=")[0] for word in words}
    own = [word for word, key in keys.items() if key not in said and key.partition(".")[0] not in _NOT_COPIED]
    return call_of([*dict.fromkeys([*own, *candidate.layout.words()]), *more], given_objects())


def _draw(found: Found, cfg: Root, run_dir: Path) -> Iterator[str]:
    """Draw the timeline of the best pipeline, if it is small enough to be readable."""
    short = (each for each in found.best if each.layout.chunks * each.layout.per_rank <= _DRAWN_CHUNKS)
    if (candidate := next((each for each in short if 1 < each.layout.pp <= _DRAWN_RANKS), None)) is not None:
        from training.reporting.timeline import draw

        figure = draw(timeline_of(candidate), f"{cfg.model.name}, predicted for {cfg.cluster.name}", candidate.name)
        figure.savefig(run_dir / _PICTURE)
        yield f"the best pipeline's timeline, as predicted: {run_dir / _PICTURE}"


def timeline_of(candidate: Candidate) -> Intervals:
    """Return the predicted timeline of a pipeline's step."""
    layout, costs = candidate.layout, candidate.devices.costs
    stages = stage_seconds(candidate.layers, layout, costs)
    whole = duration(stages, layout.pp, layout.chunks, layout.schedule)
    part = slowed(stages, whole, layout, costs)
    stages = [StageSeconds(*(part * seconds for seconds in stage)) for stage in stages]
    return simulate(stages, layout.pp, layout.chunks, layout.schedule)
