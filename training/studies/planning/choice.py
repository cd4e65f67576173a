"""``parallel=auto`` and ``parallel.chunks=auto``: the choice of the layout with the fastest prediction on this machine.

The choice is made once, before the processes of the run start, so all ranks and a resumed run use the same layout.
Measurements run in separate processes and change nothing in this process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common.errors import PlanError
from common.machine import available_memory, usable_cores
from conf.instantiate import in_section, to_dict, with_values
from conf.schema import Root
from launchers import World
from parallel.layout import Layout
from parallel.strategies import strategy_info
from planner.costs import MeasuredCosts
from planner.here import Subject, free_memory, measure
from planner.memory import Allocation
from planner.search import Candidate, Devices, Found, Pool, search
from training.callbacks.averaging import states_of_run
from training.optimizer import Optimizer
from training.reporting.metrics import SUMMARY, read_object, write_json
from training.run.prepare import BALANCES, PlannedRun, in_one_process, prepare
from training.run.setup import Setup
from training.studies.planning import AUTO
from training.studies.planning.paper import batchnorm_of, cluster_of, on_paper, paper_is_off, predict_on_paper, tables
from training.studies.planning.trial import try_layout
from training.studies.planning.typed import fixed_of, possible_layouts

CHOICES = "choices.json"
_HERE_IS_OFF = "such predictions were 11 % off on average for six small models on two cores: docs/planner.md"
_NEAR, _MOST_TRIED = 1.3, 3  # the first few layouts with predictions up to this factor are tried
_SECONDS = 1.0  # duration of a trial
_MOST_PROCESSES = 8  # on a CPU
_RUN = 16 * 2**20  # bytes that the training loop and its threads need in a process


def choose(cfg: Root, run_dir: Path, world: World | None, words: Sequence[str] = ()) -> Any:
    """Print the best layouts, and return the configuration with the fastest layout.

    Args:
        cfg: The configuration.
        run_dir: The run directory, where choices.json is written.
        world: The ranks if they exist already; None if this process will start them.
        words: The command line, for the commands to copy.

    Raises:
        PlanError: If nothing can be measured, because the ranks exist already or the mode does not train, or if no
            layout fits.
    """
    key = "parallel=auto" if cfg.parallel.name == AUTO else "parallel.chunks=auto"
    queued = cfg.launcher.name != "local"
    if cfg.mode not in ("train", "plan") or world is not None:
        raise PlanError(
            f"{key} chooses before processes start: it needs mode=train or mode=plan, and no torchrun. Let it choose "
            "once, and type the layout here"
        )
    if queued and not (cfg.parallel.name == AUTO and on_paper(cfg)):
        raise PlanError(
            f"{key} measures this machine, and launcher=slurm runs on others: type parallel=auto with cluster=NAME of "
            "conf/cluster, or the layout itself, such as parallel=ddp parallel.chunks=2"
        )
    found, setup = predict_on_paper(cfg) if queued else predict_here(cfg)
    off = paper_is_off(cluster_of(cfg)[0], found) if queued else [_HERE_IS_OFF]
    print("\n".join([*tables(found, setup, words), *off]), flush=True)
    best, tried = (found.best[0], {}) if queued or cfg.mode == "plan" else pick(cfg, found.best)
    keys = best.layout.keys() if cfg.parallel.name == AUTO else {"chunks": best.layout.chunks}
    if cfg.mode == "train":
        predicted = {"seconds": best.seconds.total, "bytes": best.memory.total, "tried": tried}
        write_json(run_dir / CHOICES, {**best.layout.keys(), **predicted})
    print(f"{' '.join(best.layout.words())} is {'the' if tried else 'predicted to be the'} fastest", flush=True)
    print("\n".join([*batchnorm_of(best, setup), ""]), flush=True)
    recompute = keys.pop("activation_checkpointing", cfg.train.activation_checkpointing)
    return with_values(cfg, {**in_section("parallel", keys), "train.activation_checkpointing": recompute})


def pick(cfg: Root, candidates: Sequence[Candidate]) -> tuple[Candidate, dict[str, float]]:
    """Return the fastest of several layouts, and the measured seconds per step by the layout's name.

    The candidates are sorted by their predicted seconds. If several predictions are close, a short run of each
    candidate decides.
    """
    if len(few := nearest(candidates)) == 1:
        return few[0], {}
    print("those that are predicted to be close, in a short run of each:", flush=True)
    seconds = {}
    for candidate in few:
        trial = try_layout(cfg, candidate, _SECONDS)
        print(f"  {candidate.name}: {trial.problem or f'{trial.seconds:.3g} s a step'}", flush=True)
        if not trial.problem:
            seconds[candidate.name] = trial.seconds
    if not seconds:
        raise PlanError("no layout that was predicted to be fast runs; see above")
    return min(few, key=lambda candidate: seconds.get(candidate.name, math.inf)), seconds


def nearest(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the first candidate and the next few with close predictions and the same recomputation."""
    first = candidates[0]
    alike = (candidate for candidate in candidates if candidate.layout.recompute == first.layout.recompute)
    return [candidate for candidate in alike if candidate.seconds.total <= _NEAR * first.seconds.total][:_MOST_TRIED]


def compared_with_prediction(run_dir: Path) -> str:
    """Return a line with predicted and measured numbers; empty if the layout was not chosen automatically."""
    chosen, summary = read_object(run_dir / CHOICES), read_object(run_dir / SUMMARY)
    if "seconds" not in chosen or not summary.get("step_time_s"):
        return ""
    seconds, measured = chosen["seconds"], summary["step_time_s"]
    used, peak = chosen["bytes"], max(summary["peak_memory_bytes"])
    return (
        f"predicted {seconds:.3g} s a step and {used / 2**30:.2f} GiB of the fullest rank, measured {measured:.3g} s "
        f"({seconds / measured - 1:+.0%}) and {peak / 2**30:.2f} GiB ({used / peak - 1:+.0%})\n"
    )


def predict_here(cfg: Root, counts: Sequence[int] = ()) -> tuple[Found, Setup]:
    """Measure this machine, and predict every layout that agrees with the typed keys.

    Args:
        cfg: The configuration.
        counts: The numbers of processes to measure. If empty, the numbers that may be fast are measured.
    """
    alone = in_one_process(cfg)
    fixed, setup = _fixed(cfg), prepare(alone)
    setup.cfg = cfg
    plan, kinds, (layers, least) = setup.plan, [], setup.work
    subject = Subject(
        alone.parallel, plan.device_type, plan.precision, setup.chain, setup.sample,
        partial(Optimizer, to_dict(cfg.optim)), PlannedRun(cfg, plan).setup, cfg.seed,
    )  # fmt: skip
    cuda, states = plan.device_type == "cuda", states_of_run(cfg, setup.chain)
    devices = torch.cuda.device_count() if cuda else 1
    memory = free_memory(alone.parallel.timeout_s) if cuda else available_memory()
    needed = max(work.kept + 2 * work.output for work in layers)  # bytes per sample of a layer and its input
    pools = [Pool(n, n, whole=True) for n in counts or _counts(fixed, plan.device_type)]
    sharing = max(pool.devices for pool in pools) if cuda else 1
    possible = possible_layouts(setup, pools, fixed, sharing)
    sizes = " and of ".join(f"{pool.devices}" for pool in possible)
    print(f"this machine is measured, in groups of {sizes} processes", flush=True)
    for (processes, *_), its_layouts in possible.items():
        each = memory / math.ceil(processes / devices)
        most = max(least, min(cfg.train.global_batch_size, int(each / 2 / needed)))
        here = measure(subject, processes, least, most)
        costs = MeasuredCosts(here, plan.precision, plan.device_type != "cpu")
        allocation = Allocation.here(plan.precision, plan.device_type, here.process + _RUN)
        kinds.append((Devices(costs, processes, each, allocation, states), its_layouts))
    return search(layers, kinds), setup


def _fixed(cfg: Root) -> dict[str, Any]:
    """Return the fixed keys: the typed keys with parallel=auto; all keys except chunks with chunks=auto."""
    if cfg.parallel.name == AUTO:
        return fixed_of(cfg)
    info = strategy_info(cfg.parallel.name)
    if info.gpu_only:
        raise PlanError(f"parallel.chunks=auto does not predict parallel={cfg.parallel.name}: give the number")
    fixed = {"strategy": cfg.parallel.name, "recompute": "full" if cfg.train.activation_checkpointing else "none"}
    if info.several_devices:  # its stages compute one after the other
        return {**fixed, "dp": 1, "pp": 1}
    simplest = {"chunks": 1, "schedule": "gpipe", "stages_per_rank": None, "balance": "uniform"}
    plan, layout = prepare(with_values(cfg, in_section("parallel", simplest))).plan, Layout.of(cfg.parallel)
    fixed |= {key: getattr(plan, key) for key in (*Layout.DEGREES, *Layout.OPTIONS, "shard", "reshard", "axes")}
    if plan.pipelined:
        fixed |= {"schedule": layout.schedule, "stages_per_rank": layout.per_rank}
        fixed["balance"] = "uniform" if layout.balance in BALANCES else layout.balance
    return fixed


def _counts(fixed: Mapping[str, Any], device_type: str) -> list[int]:
    """Return the numbers of processes to measure: one, one per device, and on a CPU also two."""
    least = math.prod(fixed.get(axis, 1) for axis in Layout.DEGREES) * math.prod(n for *_, n in fixed.get("axes", ()))
    if {"dp", "pp"} <= fixed.keys():
        return [least]
    usual = {"cuda": {1, torch.cuda.device_count()}, "mps": {1}}.get(
        device_type, {1, 2, min(usable_cores(), _MOST_PROCESSES)}
    )
    return sorted(count for count in usual if count % least == 0) or [least]
