"""Prepares a run of training or evaluation and runs it: in this process, on workers, on existing ranks, or queued."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from common.machine import changed_environment
from conf import COMMAND, EVALUATES
from conf.composition import Composed
from conf.instantiate import environment, to_dict
from conf.masking import mask_secrets
from conf.schema import Root
from conf.words import hydra_word
from launchers import Interrupted, run_workers, start_fork_server, stopping
from launchers.stopping import Stopped
from training.command.ranks import lead
from training.studies.planning import is_automatic
from training.studies.short_run import modules_of_workers

if TYPE_CHECKING:
    from training.run.setup import Setup

_AGAIN = "start it again with the same command"


def launch(composed: Composed) -> float | None:
    """Check and prepare a run, print its plan, and run it to its end, or queue it.

    Returns:
        The unigram entropy of its data in nats; None if it is unknown.

    Raises:
        UserError: An error that the user can act on.
        Stopped: The run was told to stop.
    """
    cfg, run_dir, world = composed.cfg, composed.run_dir, composed.world
    isolated = composed.job is not None  # a job leaves nothing in this process for the next one
    preload(composed, isolated or is_automatic(cfg) or _has_workers(cfg))
    setup = prepared(composed)

    from training.run.checks.memory import check_memory_of
    from training.run.prepare import describe

    if composed.choices is not None:
        print(to_text(composed), end="\n\n", flush=True)
    print(describe(setup), flush=True)
    queued, processes, entropy = is_queued(composed), setup.plan.processes, setup.data.unigram_entropy
    if not queued:
        check_memory_of(setup, world)
    try:
        if queued:
            from training.command.slurm_job import run_as_job

            run_as_job(setup, run_dir)
        elif world is not None:
            lead(setup, composed)
        elif stopping.wanted():
            raise Stopped("stopped before the first step")
        elif processes == 1 and not isolated and not _restarts(cfg):
            from training.run.rank import run

            run(setup, run_dir)
        else:
            from training.run.prepare import PlannedRun
            from training.studies.short_run import run_on_rank

            args, cfg = (PlannedRun(setup.cfg, setup.plan), run_dir), setup.cfg
            del setup  # workers build their own
            run_workers(run_on_rank, args, processes, run_dir / "logs", _restarts(cfg), True, cfg.parallel.timeout_s)
    except Stopped as stopped:
        from training.checkpoint.files import step_folders

        where = shlex.quote(f"hydra.run.dir={hydra_word(str(run_dir))}")
        resume = f"continue with the same command and train.resume=auto {where}"
        starts = cfg.train.resume in (None, "auto")  # otherwise train.resume=auto would not start where this run does
        again = cfg.mode != "train" or not (starts or step_folders(run_dir / "checkpoints"))
        raise Stopped(f"{stopped}; {_AGAIN if again else resume}") from None
    return entropy


# -- before the run --------------------------------------------------------------------------------------------------


@contextmanager
def nothing_begun() -> Iterator[None]:
    """Convert a request to stop during the preparations to ``Stopped``."""
    try:
        yield
    except Interrupted as interrupted:
        if interrupted.signum not in stopping.SIGNALS or stopping.second_signal():
            raise
        raise Stopped(f"stopped before the first step; {_AGAIN}") from None


@nothing_begun()
def prepared(composed: Composed) -> Setup:
    """Check a run and prepare it; a queued run is only checked. Its configuration has measured and chosen values."""
    # Only now, because these import torch.
    from parallel.late_imports import import_compiler_late
    from training.checkpoint.load import after_restart
    from training.command.slurm_job import prepare_here
    from training.reporting.run_directory import started_again
    from training.run.prepare import prepare

    cfg, run_dir, world = composed.cfg, composed.run_dir, composed.world
    if not cfg.train.compile:
        import_compiler_late()
    if started_again() and cfg.mode == "train":
        cfg = after_restart(cfg, run_dir)
    if cfg.train.resume is not None or cfg.mode in EVALUATES:
        from training.studies.planning.recall import recall

        cfg = recall(cfg, run_dir)
    if is_automatic(cfg):
        from training.studies.planning.choice import choose

        cfg = choose(cfg, run_dir, world, composed.words())
    if is_queued(composed):
        return prepare_here(cfg)
    return prepare(cfg) if world is None else prepare(cfg, world.size, world.nodes)


def preload(composed: Composed, workers: bool) -> None:
    """If ``workers`` will start, start the process that forks them and imports their modules."""
    if workers and composed.world is None and composed.cfg.launcher.name == "local":
        with changed_environment(environment(composed.cfg)):
            start_fork_server(modules_of_workers(composed.cfg))


def _has_workers(cfg: Root) -> bool:
    from parallel.strategies import strategy_info

    return strategy_info(cfg.parallel.name).has_workers or bool(cfg.parallel.axes or _restarts(cfg))


def to_text(composed: Composed) -> str:
    """Return the configuration for the console: the typed words, or with print_config=true all of it."""
    if composed.cfg.print_config:
        shown = {key: value for key, value in mask_secrets(to_dict(composed.cfg)).items() if key != COMMAND}
        return OmegaConf.to_yaml(OmegaConf.create(shown)).rstrip()
    chosen, changes = composed.differences()
    lines = [" ".join(f"{group}={option}" for group, option in chosen.items()), " ".join(mask_secrets(changes))]
    return "\n".join(filter(None, lines))


# -- the ways to run -------------------------------------------------------------------------------------------------


def is_queued(composed: Composed) -> bool:
    """Return whether the run will be a queued job."""
    return composed.world is None and composed.cfg.launcher.name == "slurm"


def _restarts(cfg: Root) -> int:
    return cfg.launcher.get("max_restarts", 0) if cfg.mode == "train" else 0
