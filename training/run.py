"""One rank's whole run: meet the others, build, train or evaluate, report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from launchers import World, connect
from launchers.stopping import Stopped
from parallel.build import build_strategy
from parallel.devices import keep_freed_memory, share_cores
from parallel.plan import Plan
from parallel.precision import parameter_dtype
from parallel.strategy import Options, Strategy
from parallel.timeline import Interval, Recording, bubble_fraction, on_one_clock
from training import checkpoint
from training.checkpoint import Checkpoints
from training.config import environment, plain
from training.errors import TrainingError
from training.evaluate import evaluate, record_of
from training.init_from import start
from training.instantiate import instantiate
from training.loop import Loop, Outcome, due
from training.memory_estimate import stage_activations
from training.modes import checkpoint_of
from training.optimizer import Optimizer
from training.records import MetricsFile, Progress, describe, peak_memory_bytes, write_json
from training.report import METRICS, SUMMARY, final_words
from training.resume import resume
from training.setup import Setup, prepare
from training.trace import why_no_timeline, write_timeline

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "mps": "gloo"}


def run(
    cfg: Any,
    run_dir: Path,
    world: World | None = None,
    store: dist.Store | None = None,
    setup: Setup | None = None,
) -> dict:
    """Train or evaluate as ``cfg`` says, as the rank that ``world`` says (alone where it is None).

    run_dir  where rank 0 writes; it exists
    store    an agreed key-value store where the ranks have met already
    setup    what ``prepare`` made of ``cfg``, where this process has done that already
    returns  the content of summary.json, on every rank
    """
    world = world or World.alone()
    run_dir = Path(run_dir)
    os.environ.update(environment(cfg))
    share_cores(world.local_size, cfg.parallel.threads)
    _set_arithmetic(cfg.train)
    setup = setup or prepare(cfg, world.size)
    if setup.plan.device_type == "cpu":
        keep_freed_memory(_weights(setup.plan, world.rank))
    with _process_group(world, setup, store):
        mesh = setup.plan.mesh(world.rank).connect(cfg.parallel.timeout_s)
        options = Options(
            seed=cfg.seed,
            timeout_s=cfg.parallel.timeout_s,
            bucket_mb=cfg.parallel.bucket_mb,
            comm_hook=cfg.parallel.comm_hook,
            sync_batchnorm=cfg.parallel.sync_batchnorm,
            recompute=cfg.train.activation_checkpointing,
            compile=cfg.train.compile,
        )
        strategy = build_strategy(setup.plan, setup.chain, mesh, options, setup.sample, world.local_rank)
        try:
            return _train(setup, strategy, run_dir) if cfg.mode == "train" else _evaluate(setup, strategy, run_dir)
        finally:
            strategy.close()


def _train(setup: Setup, strategy: Strategy, run_dir: Path) -> dict:
    cfg = setup.cfg
    checkpoints = Checkpoints(
        run_dir / "checkpoints", cfg.train.keep_checkpoints, strategy.mesh, cfg.parallel.timeout_s
    )
    optimizer = Optimizer(plain(cfg.optim), strategy)
    resumed = resume(cfg.train.resume, checkpoints, strategy, optimizer)
    if resumed.path is None:
        start(cfg.model, setup.chain, strategy)
    done = resumed.step
    if done > setup.total_steps or (done == setup.total_steps and _is_complete(cfg, strategy, run_dir)):
        raise TrainingError(
            f"the checkpoint is at step {done} and the run ends at step {setup.total_steps}; set train.steps higher"
        )
    recorder = _Recorder(setup, strategy, run_dir, first_step=done + 1)
    no_timeline = why_no_timeline(setup.plan) if cfg.train.trace else None
    if no_timeline is not None:
        recorder.say(no_timeline)
    summary = None
    try:
        loop = Loop(setup, strategy, optimizer, checkpoints, recorder.record, recorder.show, recorder.say)
        loop.restore(resumed.progress, resumed.path)
        outcome = loop.run(done + 1, recorder.lacks_evaluation(done))
        test = {}
        if setup.data.test is not None and cfg.train.eval_every is not None:
            try:
                test = _evaluate_split(setup, strategy, "test")
            except Stopped:
                loop.stop(outcome.steps)
        ranks = _gather(strategy, outcome)
        summary = _summarise(setup, strategy, outcome, test, ranks)
    finally:
        checkpoints.close()
        recorder.close(summary)
    if strategy.mesh.rank == 0:
        if cfg.train.trace and no_timeline is None:
            write_timeline(run_dir, setup.plan, cfg.model.name, [rank.intervals for rank in ranks], outcome.steps)
        print(final_words(summary, run_dir, _overrides(run_dir), outcome.checkpoint), flush=True)
    return summary


def _is_complete(cfg: Any, strategy: Strategy, run_dir: Path) -> bool:
    """Whether there is nothing left to do after the last step. Else the run was stopped in an evaluation after it."""
    return cfg.train.resume != "auto" or strategy.sum_of((run_dir / SUMMARY).exists())[0] > 0


def _evaluate(setup: Setup, strategy: Strategy, run_dir: Path) -> dict:
    """mode=eval: the validation and the test split under a checkpoint's weights."""
    step = checkpoint.load(checkpoint_of(setup.cfg), strategy)
    recorder = _Recorder(setup, strategy, run_dir, first_step=1)
    found, summary = {}, None
    try:
        for prefix, source in (("val", setup.data.valid), ("test", setup.data.test)):
            if source is not None:
                found[prefix] = _evaluate_split(setup, strategy, prefix)
                recorder.record({"step": step, **found[prefix]})
                recorder.say("  ".join(f"{k} {v:.6g}" for k, v in found[prefix].items()))
        outcome = Outcome(steps=step, best_val_loss=found.get("val", {}).get("val_loss"))
        summary = _summarise(setup, strategy, outcome, found.get("test", {}), _gather(strategy, outcome))
    finally:
        recorder.close(summary)
    return summary


def _evaluate_split(setup: Setup, strategy: Strategy, prefix: str) -> dict[str, float]:
    """The results on the split that is there, "val" or "test", by their names in metrics.jsonl and summary.json."""
    source = setup.data.valid if prefix == "val" else setup.data.test
    result = evaluate(strategy, source, setup.cfg.train.eval_batches)
    return record_of(result, prefix, language=setup.tokens_per_sample is not None)


class _Rank(NamedTuple):
    """What the others must know of a rank at the end: bytes, seconds, and its newest steps' intervals."""

    peak_memory: int
    step_time: float | None
    intervals: list[list[Interval]]


def _gather(strategy: Strategy, outcome: Outcome) -> list[_Rank]:
    """Every rank's numbers, its intervals on one clock. All ranks call it."""
    several = strategy.mesh.size > 1
    if several:
        dist.barrier()
    recording = Recording.of(strategy.timeline)
    mine = (peak_memory_bytes(strategy.device), outcome.times.median_after_warmup(), recording)
    everyone = [mine]
    if several:
        everyone = [None] * strategy.mesh.size
        dist.all_gather_object(everyone, mine)
    intervals = on_one_clock([recording for *_, recording in everyone])
    return [_Rank(peak, seconds, steps) for (peak, seconds, _), steps in zip(everyone, intervals, strict=True)]


def _summarise(
    setup: Setup, strategy: Strategy, outcome: Outcome, test: dict[str, float], ranks: list[_Rank]
) -> dict:
    """summary.json's content, ``test`` being the results on the test split, where there is one."""
    plan = setup.plan
    step_time = ranks[0].step_time
    samples = plan.global_batch_size / step_time if step_time else None
    tokens = setup.tokens_per_sample
    bubble = None
    if plan.pipelined and strategy.device.type == "cpu":  # a GPU's host clock does not see when its kernels run
        bubble = bubble_fraction([ranks[rank].intervals for rank in strategy.mesh.pipeline(0)])
    return {
        "model": setup.cfg.model.name,
        "parallel": plan.strategy,
        "device": plan.device_type,
        "world_size": plan.processes,
        "dp": plan.dp,
        "pp": plan.pp,
        "chunks": plan.chunks,
        "schedule": plan.schedule,
        "precision": plan.precision,
        "parameters": plan.parameters,
        "steps": outcome.steps,
        "first_loss": outcome.first_loss,
        "final_loss": outcome.final_loss,
        "skipped_steps": outcome.skipped,
        "best_val_loss": outcome.best_val_loss,
        **{"test_loss": None, **test},
        "step_time_s": step_time,
        "samples_per_s": samples,
        "tokens_per_s": samples * tokens if samples and tokens else None,
        "peak_memory_bytes": [rank.peak_memory for rank in ranks],
        "bubble_fraction": bubble,
        "ideal_bubble_fraction": plan.ideal_bubble,
        "stages": [
            {"layers": list(s.layers), "parameters": s.parameters, "activation_bytes": held}
            for s, held in zip(plan.stages, stage_activations(plan, setup.chain, setup.sample), strict=True)
        ],
    }


class _Recorder:
    """Where rank 0's numbers go: metrics.jsonl, wandb, the progress bar. Silent on other ranks."""

    def __init__(self, setup: Setup, strategy: Strategy, run_dir: Path, first_step: int) -> None:
        self._talks = strategy.mesh.rank == 0
        if not self._talks:
            return
        cfg = setup.cfg
        self._setup, self._run_dir = setup, run_dir
        write_json(run_dir / "environment.json", describe())
        with suppress(OSError):
            (run_dir / SUMMARY).unlink()  # of the run that this one goes on with: it speaks of fewer steps
        self._metrics = MetricsFile(run_dir / METRICS)
        if cfg.train.resume is not None:
            self._metrics.truncate_after(first_step - 1)
        self._logger = instantiate(plain(cfg.logger), run_dir=run_dir, run_config=plain(cfg), run_name=_run_name(cfg))
        self._progress = Progress(setup.total_steps, first_step, tokens=setup.tokens_per_sample is not None)

    def lacks_evaluation(self, step: int) -> bool:
        """Whether the run was stopped before or in the evaluation that was due after ``step``, so that it is on record
        with its training only. As rank 0 knows; False on other ranks."""
        if step == 0 or not self._talks or not due(self._setup.cfg.train.eval_every, step, self._setup.total_steps):
            return False
        lines = self._metrics.of_step(step)
        return bool(lines) and not any("val_loss" in line for line in lines)

    def record(self, line: dict) -> None:
        if self._talks:
            self._metrics.write(line)
            self._logger.log(line, line["step"])

    def show(self, *args) -> None:
        if self._talks:
            self._progress.update(*args)

    def say(self, text: str) -> None:
        if self._talks:
            self._progress.say(text)

    def close(self, summary: dict | None) -> None:
        """``summary`` is None for a run that failed: no summary.json then."""
        if not self._talks:
            return
        self._progress.close()
        if summary is not None:
            write_json(self._run_dir / SUMMARY, summary)
        self._metrics.close()
        self._logger.finish(summary, exit_code=0 if summary is not None else 1)


def _run_name(cfg: Any) -> str:
    return f"{cfg.model.name}-{cfg.parallel.name}"


def _overrides(run_dir: Path) -> list[str]:
    """What the user typed, as Hydra wrote it into the run directory."""
    from omegaconf import OmegaConf

    path = run_dir / ".hydra" / "overrides.yaml"
    # Not resolved: a value may stand for a secret of the environment.
    return OmegaConf.to_container(OmegaConf.load(path), resolve=False) if path.exists() else []


@contextmanager
def _process_group(world: World, setup: Setup, store: dist.Store | None) -> Iterator[None]:
    if world.size == 1:
        yield
        return
    timeout_s = setup.cfg.parallel.timeout_s
    device_type = setup.plan.device_type
    kwargs = {"device_id": torch.device("cuda", world.local_rank)} if device_type == "cuda" else {}
    dist.init_process_group(
        _BACKENDS[device_type],
        store=store if store is not None else connect(world, timeout_s),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
        **kwargs,
    )
    stopped = None
    try:
        try:
            yield
        except Stopped as early:
            stopped = early
        # All leave together: a rank that is gone early looks to its neighbours like one that died.
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if stopped is not None:
        raise stopped


def _weights(plan: Plan, rank: int) -> int:
    """Bytes of the weights that ``rank`` holds."""
    stages = plan.stages_of(plan.mesh(rank).position)
    return sum(stage.parameters for stage in stages) * parameter_dtype(plan.precision).itemsize


def _set_arithmetic(train: Any) -> None:
    """How the device may compute: bit for bit alike, in TF32, with cuDNN's measured choice of algorithms."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = train.tf32
    torch.backends.cudnn.benchmark = train.cudnn_benchmark
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
