"""What a user may leave to measurement: ``parallel.balance=time|size`` and ``parallel.chunks=auto``.

Settled once, before the run's processes start: from then on the configuration holds the numbers, so that all ranks
and a resumed run have the same. Nothing that the run will use is touched: layers are measured on copies, chunk counts
in trial runs with processes of their own.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import PlanError
from common.machine import available_memory
from data.batch import Batch
from launchers import ForkServer, WorkerFailed, World, run_workers
from models.chain import Chain
from parallel.balance import bytes_per_layer, equal_stages, seconds_per_layer
from parallel.devices import resolve_device_type
from parallel.memory import tensors_per_parameter
from parallel.plan import Plan
from training.checkpoint import newest, read_manifest
from training.config import to_config, to_dict
from training.reporting import write_json
from training.reporting.console import METRICS, SUMMARY
from training.reporting.metrics import read_records

CHOICES = "choices.json"
AUTO = "auto"
_BALANCES = ("time", "size")
_TRIAL_STEPS = 6
_MOST_CANDIDATES = 10
# Where two counts in a row have become so much slower than the best, still more chunks will not be faster.
_HOPELESS = 1.15
# Counts within this of the best are tried once more, so that a moment's noise does not decide.
_NEAR = 1.1


def recall(cfg: Any, run_dir: Path) -> None:
    """Put what the checkpoint to go on from was trained with in the place of words that would be measured again."""
    resume = cfg.train.resume
    if resume is None or (cfg.parallel.chunks != AUTO and cfg.parallel.balance not in _BALANCES):
        return
    path = newest(run_dir / "checkpoints") if resume == "auto" else Path(resume)
    if path is None:
        return
    layout = read_manifest(path)["layout"]
    if layout["parallel"] != cfg.parallel.name or layout["pp"] != cfg.parallel.pp:
        return
    if cfg.parallel.chunks == AUTO:
        cfg.parallel.chunks = layout["chunks"]
    if cfg.parallel.balance in _BALANCES:
        cfg.parallel.balance = [len(layers) for layers in layout["stages"]]


def layer_costs(cfg: Any, plan: Plan, chain: Chain, sample: Batch) -> list[float] | None:
    """Seconds or bytes of each layer as ``parallel.balance`` asks; None where it asks for neither, or one stage needs
    no balance."""
    if cfg.parallel.balance not in _BALANCES or len(plan.stages) == 1:
        return None
    if cfg.parallel.balance == "time":
        return seconds_per_layer(plan, chain, sample, cfg.seed, cfg.parallel.threads)
    return bytes_per_layer(plan, chain, sample, tensors_per_parameter(to_dict(cfg.optim)))


def settle_balance(cfg: Any, plan: Plan, costs: list[float]) -> None:
    """Replace the word in the configuration by the number of layers of each stage."""
    cfg.parallel.balance = equal_stages(costs, len(plan.stages), plan.pp, plan.chunks, plan.schedule)


@dataclass
class Trial:
    """``step_time_s``: the fastest step's; ``peak_memory_bytes``: over all ranks; ``problem``: why it cannot be chosen,
    if so."""

    chunks: int
    step_time_s: float | None = None
    peak_memory_bytes: int | None = None
    problem: str = ""


def settle_chunks(cfg: Any, run_dir: Path, world: World | None, server: ForkServer | None = None) -> None:
    """Try a few steps with each chunk count, print the table, and put the fastest that fits into the configuration.

    Raises PlanError where there is nobody to try (ranks that were started already, modes that do not train) and where
    no count runs.
    """
    if cfg.parallel.chunks != AUTO:
        return
    if cfg.mode != "train" or world is not None or cfg.launcher.name != "local":
        raise PlanError(
            "parallel.chunks=auto starts trial runs of its own on this machine: it needs mode=train, launcher=local "
            "and no torchrun. Let it choose once, and give the number here"
        )
    limit = available_memory() if resolve_device_type(cfg.device) == "cpu" else math.inf
    print("parallel.chunks=auto: a few steps with each", flush=True)
    trials: list[Trial] = []
    for chunks in candidates(cfg.train.global_batch_size):
        trial = _try(cfg, chunks, server)
        if trial is None:
            continue
        if (trial.peak_memory_bytes or 0) > limit:
            trial.problem = f"needs more than the {limit / 2**30:.1f} GiB that are free"
        trials.append(trial)
        print(_row(trial), flush=True)
        if _hopeless(trials):
            break
    best = _fastest(cfg, trials, server)
    cfg.parallel.chunks = best.chunks
    write_json(run_dir / CHOICES, {"chunks": best.chunks, "trials": [asdict(trial) for trial in trials]})
    print(f"parallel.chunks={best.chunks} is the fastest\n", flush=True)


def _hopeless(trials: list[Trial]) -> bool:
    times = [trial.step_time_s for trial in trials if not trial.problem]
    return len(times) > 2 and min(times[-2:]) > _HOPELESS * min(times)


def _fastest(cfg: Any, trials: list[Trial], server: ForkServer | None) -> Trial:
    """Of those that fit; the nearest to the best get a second trial, and their faster one counts."""
    fit = [trial for trial in trials if not trial.problem]
    if not fit:
        raise PlanError(
            "parallel.chunks=auto: no chunk count ran. "
            + "; ".join(f"{trial.chunks}: {trial.problem}" for trial in trials)
        )
    least = min(trial.step_time_s for trial in fit)
    near = [trial for trial in fit if trial.step_time_s <= _NEAR * least]
    if len(near) > 1:
        print("and once more those that are near the fastest", flush=True)
        for trial in near:
            again = _try(cfg, trial.chunks, server)
            if again.step_time_s is not None:
                trial.step_time_s = min(trial.step_time_s, again.step_time_s)
            print(_row(trial), flush=True)
    return min(near, key=lambda trial: trial.step_time_s)


def candidates(batch: int) -> list[int]:
    """Chunk counts to try, ascending: divisors of the batch, thinned out where there are many."""
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    while len(divisors) > _MOST_CANDIDATES:
        # Drop the one whose neighbours are nearest to each other, in proportion.
        inner = range(1, len(divisors) - 1)
        del divisors[min(inner, key=lambda i: divisors[i + 1] / divisors[i - 1])]
    return divisors


def _try(cfg: Any, chunks: int, server: ForkServer | None) -> Trial | None:
    """A short run of its own; None where the layout cannot have so many chunks."""
    from training.setup import prepare

    trial = copy.deepcopy(cfg)
    trial.parallel.chunks = chunks
    trial.logger = {"_target_": "training.reporting.NoLogger", "_recursive_": False, "_convert_": "all"}
    trial.train.update(steps=_TRIAL_STEPS, epochs=None, eval_every=None, checkpoint_every=None, resume=None)
    trial.train.update(profile=0, trace=False)
    try:
        plan = prepare(trial).plan
    except PlanError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        args = (to_dict(trial), folder)
        try:
            run_workers(_work, args, plan.processes, Path(folder) / "logs", server=server)
        except WorkerFailed as failure:
            return Trial(chunks, problem=_reason(failure))
        summary = json.loads((Path(folder) / SUMMARY).read_text())
        times = [record.get("step_time_s") for record in read_records(Path(folder) / METRICS)]
    return Trial(chunks, min(filter(None, times)), sum(summary["peak_memory_bytes"]))


def _work(world: World, tree: dict, folder: str) -> None:
    """A worker of a trial: rank 0 is silent too."""
    from launchers.failure import log_path
    from launchers.worker import redirect_output
    from training.run import run

    if world.rank == 0:
        redirect_output(log_path(Path(folder) / "logs", 0))
    run(to_config(tree), Path(folder), world)


def _reason(failure: WorkerFailed) -> str:
    """Its last line says what; a kill is the system's answer to too little memory."""
    return "out of memory" if failure.kind == "signal" else failure.text.strip().splitlines()[-1][:200]


def _row(trial: Trial) -> str:
    if trial.step_time_s is None:
        return f"  chunks {trial.chunks:>4}   {trial.problem}"
    time, memory = f"{trial.step_time_s * 1e3:>9.1f} ms a step", f"{trial.peak_memory_bytes / 2**30:.2f} GiB"
    return f"  chunks {trial.chunks:>4}   {time}   {memory}   {trial.problem}".rstrip()
