"""``parallel.chunks=auto``: the number of micro-batches that is fastest on this machine.

It is chosen once, before the run's processes start: from then on the configuration holds the number, so that all ranks
and a resumed run have the same. Chunk counts are measured in trial runs with processes of their own, so nothing that
the run will use is touched.
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
from conf.instantiate import to_config, to_dict
from launchers import WorkerFailed, World, run_workers
from parallel.devices import resolve_device_type
from training.checkpoint.files import Checkpoint
from training.reporting import METRICS, SUMMARY, write_json
from training.reporting.metrics import read_records
from training.setup import BALANCES, pack_given, prepare, unpack_given

CHOICES = "choices.json"
AUTO = "auto"
_TRIAL_STEPS = 6
_MOST_CANDIDATES = 10
# Where two counts in a row are this much slower than the best, still more chunks will not be faster.
_HOPELESS = 1.15
# Counts within this factor of the best are tried once more, so that noise does not decide.
_NEAR = 1.1


def recall(cfg: Any, run_dir: Path) -> None:
    """Replace what was measured or chosen before by what the checkpoint to resume from was trained with.

    That is ``train.precision=auto`` and, in the same layout, ``chunks=auto`` and ``balance=time|size``.

    Args:
        cfg: The configuration, which is changed.
        run_dir: The run directory, for ``train.resume=auto``.
    """
    resume = cfg.train.resume
    if not (AUTO in (cfg.train.precision, cfg.parallel.chunks) or cfg.parallel.balance in BALANCES):
        return
    saved = Checkpoint.newest(run_dir / "checkpoints") if resume == "auto" else Checkpoint.find(Path(resume))
    if saved is None:
        return
    layout = saved.layout
    if cfg.train.precision == AUTO:
        cfg.train.precision = layout.get("precision", AUTO)
    if layout["parallel"] != cfg.parallel.name or layout["pp"] != cfg.parallel.pp:
        return
    if cfg.parallel.chunks == AUTO:
        cfg.parallel.chunks = layout["chunks"]
    if cfg.parallel.balance in BALANCES:
        cfg.parallel.balance = [len(layers) for layers in layout["stages"]]


@dataclass
class Trial:
    """A trial run.

    Attributes:
        chunks: Micro-batches per replica and step.
        step_time_s: Seconds of the fastest step.
        peak_memory_bytes: The sum over all ranks.
        problem: Why it cannot be chosen; empty where it can.
    """

    chunks: int
    step_time_s: float | None = None
    peak_memory_bytes: int | None = None
    problem: str = ""


def choose_chunks(cfg: Any, run_dir: Path, world: World | None) -> None:
    """Try a few steps with each chunk count, print the table, and put the fastest that fits into the configuration.

    Args:
        cfg: The configuration, which is changed.
        run_dir: Where choices.json is written.
        world: The ranks that exist already, None where this process will start them.

    Raises:
        PlanError: Where no trials can be started (ranks that exist already, modes that do not train), and where no
            count runs.
    """
    if cfg.mode != "train" or world is not None or cfg.launcher.name != "local":
        raise PlanError(
            "parallel.chunks=auto starts trial runs of its own on this machine: it needs mode=train, launcher=local "
            "and no torchrun. Let it choose once, and give the number here"
        )
    limit = available_memory() if resolve_device_type(cfg.device) == "cpu" else math.inf
    print("parallel.chunks=auto: a few steps with each", flush=True)
    trials: list[Trial] = []
    for chunks in candidates(cfg.train.global_batch_size):
        trial = _try(cfg, chunks)
        if trial is None:
            continue
        if (trial.peak_memory_bytes or 0) > limit:
            trial.problem = f"needs more than the {limit / 2**30:.1f} GiB that are free"
        trials.append(trial)
        print(_row(trial), flush=True)
        times = [trial.step_time_s for trial in trials if not trial.problem]
        if len(times) > 2 and min(times[-2:]) > _HOPELESS * min(times):
            break
    best = _fastest(cfg, trials)
    cfg.parallel.chunks = best.chunks
    write_json(run_dir / CHOICES, {"chunks": best.chunks, "trials": [asdict(trial) for trial in trials]})
    print(f"parallel.chunks={best.chunks} is the fastest\n", flush=True)


def _fastest(cfg: Any, trials: list[Trial]) -> Trial:
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
        print("once more, those that are close to the fastest", flush=True)
        for trial in near:
            again = _try(cfg, trial.chunks)
            if again.step_time_s is not None:
                trial.step_time_s = min(trial.step_time_s, again.step_time_s)
            print(_row(trial), flush=True)
    return min(near, key=lambda trial: trial.step_time_s)


def candidates(batch: int) -> list[int]:
    """Chunk counts to try, ascending: the divisors of ``batch`` samples, thinned out where there are many."""
    divisors = [n for n in range(1, batch + 1) if batch % n == 0]
    while len(divisors) > _MOST_CANDIDATES:
        # Drop the one whose neighbours are nearest to each other, in proportion.
        inner = range(1, len(divisors) - 1)
        del divisors[min(inner, key=lambda i: divisors[i + 1] / divisors[i - 1])]
    return divisors


def _try(cfg: Any, chunks: int) -> Trial | None:
    """A short run of its own; None where the layout cannot have so many chunks."""
    trial = copy.deepcopy(cfg)
    trial.parallel.chunks = chunks
    trial.update(logger={"_target_": "training.reporting.NoLogger"}, loggers=None, callbacks=None)
    trial.train.update(steps=_TRIAL_STEPS, epochs=None, eval_every=None, checkpoint_every=None, resume=None)
    trial.train.update(profile=0, trace=False)
    try:
        plan = prepare(trial).plan
    except PlanError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        args = (to_dict(trial), folder, pack_given())
        try:
            run_workers(_work, args, plan.processes, Path(folder) / "logs")
        except WorkerFailed as failure:
            return Trial(chunks, problem=_reason(failure))
        summary = json.loads((Path(folder) / SUMMARY).read_text())
        times = [record.get("step_time_s") for record in read_records(Path(folder) / METRICS)]
    return Trial(chunks, min(filter(None, times)), sum(summary["peak_memory_bytes"]))


def _work(world: World, tree: dict, folder: str, given: bytes | None) -> None:
    """What each worker of a trial runs: rank 0 is silent too."""
    from launchers.worker import redirect_output
    from training.run import run

    if world.rank == 0:
        redirect_output(Path(folder) / "logs", 0)
    unpack_given(given)
    run(to_config(tree), Path(folder), world)


def _reason(failure: WorkerFailed) -> str:
    """The last line of the error; a killed worker means that memory ran out."""
    return "out of memory" if failure.kind == "signal" else failure.text.strip().splitlines()[-1][:200]


def _row(trial: Trial) -> str:
    if trial.step_time_s is None:
        return f"  chunks {trial.chunks:>4}   {trial.problem}"
    time, memory = f"{trial.step_time_s * 1e3:>9.1f} ms a step", f"{trial.peak_memory_bytes / 2**30:.2f} GiB"
    return f"  chunks {trial.chunks:>4}   {time}   {memory}   {trial.problem}".rstrip()
