"""One rank's whole run: meet the others, build, train or evaluate, report."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.errors import TrainingError
from launchers import World, connect
from launchers.stopping import Stopped
from parallel.build import build_strategy
from parallel.devices import keep_freed_memory, share_cores
from parallel.plan import Plan
from parallel.precision import parameter_dtype
from parallel.strategy import Options, Strategy
from training import checkpoint
from training.checkpoint import Checkpoints
from training.checkpoint.init_from import start
from training.checkpoint.resume import resume
from training.config import environment, to_dict
from training.evaluate import evaluate, record_of
from training.loop import Loop, Outcome
from training.optimizer import Optimizer
from training.reporting.console import SUMMARY, final_words
from training.reporting.recorder import Recorder
from training.reporting.summary import known_of_ranks, summarise
from training.reporting.timeline_files import why_no_timeline, write_timeline
from training.setup import Setup, checkpoint_of, prepare

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
    optimizer = Optimizer(to_dict(cfg.optim), strategy)
    resumed = resume(cfg.train.resume, checkpoints, strategy, optimizer)
    if resumed.path is None:
        start(cfg.model, setup.chain, strategy)
    done = resumed.step
    if done > setup.total_steps or (done == setup.total_steps and _is_complete(cfg, strategy, run_dir)):
        raise TrainingError(
            f"the checkpoint is at step {done} and the run ends at step {setup.total_steps}; set train.steps higher"
        )
    recorder = Recorder(setup, strategy, run_dir, first_step=done + 1)
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
        ranks = known_of_ranks(strategy, outcome)
        summary = summarise(setup, strategy, outcome, test, ranks)
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
    recorder = Recorder(setup, strategy, run_dir, first_step=1)
    found, summary = {}, None
    try:
        for prefix, source in (("val", setup.data.valid), ("test", setup.data.test)):
            if source is not None:
                found[prefix] = _evaluate_split(setup, strategy, prefix)
                recorder.record({"step": step, **found[prefix]})
                recorder.say("  ".join(f"{k} {v:.6g}" for k, v in found[prefix].items()))
        outcome = Outcome(steps=step, best_val_loss=found.get("val", {}).get("val_loss"))
        summary = summarise(setup, strategy, outcome, found.get("test", {}), known_of_ranks(strategy, outcome))
    finally:
        recorder.close(summary)
    return summary


def _evaluate_split(setup: Setup, strategy: Strategy, prefix: str) -> dict[str, float]:
    """The results on the split that is there, "val" or "test", by their names in metrics.jsonl and summary.json."""
    source = setup.data.valid if prefix == "val" else setup.data.test
    result = evaluate(strategy, source, setup.cfg.train.eval_batches)
    return record_of(result, prefix, language=setup.tokens_per_sample is not None)


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
