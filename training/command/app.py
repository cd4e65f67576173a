"""One run: checked, then run in this process, on workers of this machine, or among existing ranks."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, flag_override

from common.errors import TrainingError, exit_is_failure, printable
from common.machine import changed_environment, check_memory, styled
from conf import COMMAND
from conf.composition import (
    check_received,
    compose_own,
    composed_by,
    differences,
    hydra_word,
    quote_values,
    typed_overrides,
)
from conf.instantiate import add_to_path, environment, to_config, to_dict
from conf.masking import hide, mask_secrets
from launchers import Interrupted, WorkerFailed, World, run_workers, start_fork_server, stopping
from launchers.failure import EndedTogether
from launchers.heartbeat import note
from launchers.stopping import Stopped
from training.studies.planning import is_automatic

if TYPE_CHECKING:
    from launchers.meeting import Place
    from training.checkpoint.configuration import SavedConfig
    from training.run.setup import Setup

ALONE = ("export", "sample")  # modes that need one process whatever the strategy is
_JOB = "job"  # what rank 0 tells the others
_AGAIN = "start it again with the same command"
_OPEN_FILES = 4096  # that a process may have: a launcher holds several of each worker


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn what a user can act on into one message and an exit code; an error of the program's own keeps its traceback.

    Raises:
        SystemExit: With code 1 after an error. With ``stopping.EXIT_CODE`` for a run that has stopped as it was told to
            and can go on; with 128 + the signal's number where it was told twice.
    """
    try:
        yield
    except Stopped as stopped:
        print(stopped, end="\n" if str(stopped) else "", file=sys.stderr)
        raise SystemExit(stopping.EXIT_CODE) from None
    except (KeyboardInterrupt, Exception) as error:
        code, message = _described(error)
        if message is None:
            raise
        if message:
            print(f"{styled('error:', 'red', sys.stderr)} {message}", file=sys.stderr)
        raise SystemExit(code) from None


def _described(error: BaseException) -> tuple[int, str | None]:
    """Return the exit code of an error and its message; None for the message of an error of the program's own."""
    if isinstance(error, EndedTogether):
        code, message = error.exit_code, str(error)
    elif isinstance(error, Interrupted):
        code, message = error.exit_code if error.signum in stopping.SIGNALS else 1, str(error)
    elif isinstance(error, KeyboardInterrupt):
        code, message = 1, "stopped by SIGINT"
    else:
        from conf.messages import explain

        code, message = 1, explain(error)
    return code, message and printable(hide(message))


@contextmanager
def leading(world: World | None, arguments: Sequence[str]) -> Iterator[None]:
    """Meet the other ranks before anything is read or prepared, on rank 0 of ranks that exist already.

    They wait as long as this rank lives, and end with it where it ends without a run.
    """
    if world is None or world.size == 1:
        yield
        return
    from launchers.meeting import ending_together, rendezvous

    if world.origin == "torchrun":
        stopping.stop_without_parent()
    with rendezvous(world, _typed_timeout(arguments)) as (store, _), ending_together(store, _JOB, _ended):
        note(0, "reading the command line and preparing the data")
        yield


def _ended(error: BaseException) -> tuple[int, str]:
    """Return the exit code of rank 0 after an error, and its message for the other ranks."""
    if isinstance(error, Stopped):
        return stopping.EXIT_CODE, ""
    if isinstance(error, SystemExit):  # Hydra has said why
        return error.code if isinstance(error.code, int) else int(error.code is not None), "its output says why"
    code, message = _described(error)
    return code, message or printable(hide(repr(error)))


@exit_is_failure()
def execute(cfg: Any, run_dir: Path, world: World | None, hydra: Any = None, isolated: bool = False) -> None:
    """Run a composed configuration; on rank 0 of existing ranks, lead them.

    Everything that can be checked is checked before any process starts.

    Args:
        cfg: The configuration.
        run_dir: The run directory, which exists.
        world: The ranks that exist already; None where this process starts what the run needs.
        hydra: Hydra's own section, to show what was typed and to keep how the run was composed; None
            for a configuration that was made in another way.
        isolated: Run in separate processes even where one is enough, so that nothing is left here for the next job.

    Raises:
        UserError: For what the user can act on.
        Stopped: For a run that was told to stop.
    """
    _allow_open_files()
    composed, cfg = cfg, plain(cfg, hydra)
    if cfg.mode == "verify":
        raise TrainingError(
            "mode=verify is a command of its own, not a job of a sweep or of train(): python train.py mode=verify, or "
            "from Python training.verify(...)"
        )
    if cfg.mode in ("plan", "compare", *ALONE):
        stopping.at_once()
    words = _words(cfg, hydra)
    if cfg.parallel.name == "auto" and cfg.mode == "plan":
        from training.studies.planning.paper import on_paper, plan_on_paper

        if on_paper(cfg):
            print(plan_on_paper(cfg, run_dir, words))
            return
    if cfg.mode in ALONE:
        from training.command.modes import run_alone

        run_alone(cfg, run_dir, world)
        return
    _start_fork_server(cfg, world, isolated)
    if cfg.mode == "compare":
        from training.studies.planning.comparison import compare

        with _nothing_begun():
            print(compare(cfg, run_dir, world, words))
        return
    automatic = is_automatic(cfg)
    setup = prepared(cfg, run_dir, world, words)
    _describe(setup, composed, hydra)
    if cfg.mode == "plan":
        return
    queued, processes, entropy = _is_queued(cfg, world), setup.plan.processes, setup.data.unigram_entropy
    if not queued:
        _check_memory(setup, world)
    try:
        if queued:
            from training.command.slurm_job import run_as_job

            run_as_job(setup, run_dir)
        elif world is not None:
            _lead(setup, run_dir, world)
        elif stopping.wanted():
            raise Stopped("stopped before the first step")
        elif processes == 1 and not isolated and not _restarts(cfg):
            from training.run.rank import run

            run(cfg, run_dir, setup=setup)
        else:
            del setup  # workers build their own
            _start_workers(cfg, run_dir, processes)
    except Stopped as stopped:
        where = shlex.quote(f"hydra.run.dir={hydra_word(str(run_dir))}")
        resume = f"go on with the same command and train.resume=auto {where}"
        raise Stopped(f"{stopped}; {resume if cfg.mode == 'train' else _AGAIN}") from None
    if cfg.mode == "train" and not queued:
        if not isolated:
            from training.command.modes import closing_sample

            print(closing_sample(cfg, run_dir, entropy), end="", flush=True)
        if automatic:
            from training.studies.planning.choice import compared_with_prediction

            print(compared_with_prediction(run_dir), end="", flush=True)


def _words(cfg: Any, hydra: Any) -> list[str]:
    """Return the command line's words, for commands to copy; empty for a configuration that was made in another way."""
    if hydra is None:
        return []
    own = [word for word in cfg[COMMAND]["where"] if word.startswith("--config-dir=")]
    return [*own, *mask_secrets(typed_overrides(hydra))]


# -- before the run --------------------------------------------------------------------------------------------------


def plain(cfg: Any, hydra: Any) -> Any:
    """Return the configuration as plain data, with how it was composed."""
    check_sections(cfg)
    tree = to_dict(cfg)
    if hydra is not None:
        tree[COMMAND] = composed_by(hydra, cfg)
    cfg = to_config(tree)
    add_to_path(cfg.import_from or ())
    if cfg.cluster is not None:
        from training.studies.planning.paper import check_cluster

        check_cluster(cfg)
    return cfg


@contextmanager
def _nothing_begun() -> Iterator[None]:
    """Before the first step, a signal that stops a run ends the preparations."""
    try:
        yield
    except Interrupted as interrupted:
        if interrupted.signum not in stopping.SIGNALS or stopping.second_signal():
            raise
        raise Stopped(f"stopped before the first step; {_AGAIN}") from None


@_nothing_begun()
def prepared(cfg: Any, run_dir: Path, world: World | None, words: Sequence[str] = ()) -> Setup:
    """Check a run and prepare it, on the submitting side of a queue too; what is left to measure is in ``cfg`` then.

    ``words`` are the command line, for commands to copy.
    """
    # Only now: they import torch.
    from parallel.devices import import_compiler_late
    from training.checkpoint.load import after_restart
    from training.command.slurm_job import prepare_here
    from training.reporting.run_directory import started_again
    from training.run.setup import prepare

    if not cfg.train.compile:
        import_compiler_late()
    if started_again() and cfg.mode == "train":
        after_restart(cfg, run_dir)
    if cfg.train.resume is not None or cfg.mode == "eval":
        from training.studies.planning.choice import recall

        recall(cfg, run_dir)
    if is_automatic(cfg):
        from training.studies.planning.choice import choose

        choose(cfg, run_dir, world, words)
    if _is_queued(cfg, world):
        return prepare_here(cfg)
    return prepare(cfg, *((world.size, world.nodes) if world else ()))


def _start_fork_server(cfg: Any, world: World | None, isolated: bool) -> None:
    """Have what a run with workers needs imported in the process that forks them, while this one checks the run."""
    from parallel.strategies import strategy_info

    parallel, automatic = cfg.parallel, is_automatic(cfg)
    info = strategy_info("single" if automatic else parallel.name)
    several = info.stage_per_rank or (info.replicas and parallel.dp != 1)
    workers = automatic or cfg.mode == "compare" or ((several or isolated or _restarts(cfg)) and cfg.mode != "plan")
    if workers and world is None and cfg.launcher.name == "local":
        with changed_environment(environment(cfg)):
            start_fork_server(["training.command.preload"])


def check_sections(cfg: Any) -> None:
    """Check that every section of a composed configuration is one, whatever a file or a program has put there.

    Raises:
        TrainingError: It is a word, a number, a list or nothing.
    """
    for key in ("model", "data", "optim", "scheduler", "parallel", "logger", "launcher", "loggers"):
        section = cfg.get(key)
        if not hasattr(section, "keys") and not (key == "loggers" and section is None):
            said = "null" if section is None else section
            raise TrainingError(
                f"{key}={said} stands where a section of keys belongs: choose an option, by {key}=NAME on the command "
                f"line, '- override /{key}: NAME' in a file's defaults list, or load_config('{key}=NAME') from Python"
            )


def _allow_open_files() -> None:
    """Let this process and its workers have as many open files as they may have, up to what any run needs."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES if hard < 0 else min(_OPEN_FILES, hard), hard))


def _describe(setup: Setup, composed: Any, hydra: Any) -> None:
    """Print the configuration and the plan; with mode=plan, the memory of every rank too."""
    from training.run.setup import describe

    if hydra is not None and setup.cfg.mode in ("train", "eval"):
        print(to_text(composed, hydra), end="\n\n", flush=True)
    print(describe(setup), flush=True)
    if setup.cfg.mode == "plan":
        from parallel.shape_inference import estimate_memory
        from training.optimizer import states_of
        from training.reporting.console import describe_memory

        states, recompute = states_of(setup.cfg.optim), setup.cfg.train.activation_checkpointing
        estimates = estimate_memory(setup.plan, setup.chain, setup.sample, states, recompute)
        print("\n" + describe_memory(estimates))


def _check_memory(setup: Setup, world: World | None) -> None:
    """Check that a run whose ranks are all on this machine fits into its memory, before any of them is started.

    Counted is what is certain: processes, weights, gradients and optimizer states, of which GPUs hold all but the
    processes. (mode=plan estimates the whole, which takes seconds.)

    Raises:
        UserError: It does not.
    """
    from parallel.devices import parameter_dtype
    from parallel.shape_inference import PROCESS_BYTES
    from training.run.setup import certain_tensors

    plan, cfg = setup.plan, setup.cfg
    if world is not None and world.local_size < world.size:
        return
    needed = plan.processes * PROCESS_BYTES
    if plan.device_type == "cpu":
        copies = plan.dp / plan.mesh(0).shards
        tensors = sum(certain_tensors(cfg) * stage.parameters + stage.frozen for stage in plan.stages)
        needed += copies * tensors * parameter_dtype(plan.precision).itemsize
    check_memory(
        needed,
        f"model={cfg.model.name} parallel={plan.strategy} in {plan.processes} processes",
        "choose a smaller model or train.global_batch_size, more parallel.chunks, or fewer processes (mode=plan shows "
        "what needs how much)",
    )


# -- the ways to run -------------------------------------------------------------------------------------------------


def _start_workers(cfg: Any, run_dir: Path, processes: int) -> None:
    from training.run.setup import pack_given

    timeout_s = cfg.parallel.timeout_s
    args = to_dict(cfg), str(run_dir), pack_given()
    most, failures = _restarts(cfg), []

    def tell(failure: WorkerFailed) -> None:
        failures.append(failure)
        print(f"{failure}\nrestart {len(failures)} of {most} (launcher.max_restarts)", file=sys.stderr, flush=True)

    run_workers(work, args, processes, run_dir / "logs", most, True, timeout_s, on_restart=tell)


def _is_queued(cfg: Any, world: World | None) -> bool:
    return world is None and cfg.launcher.name == "slurm"


def _restarts(cfg: Any) -> int:
    return cfg.launcher.get("max_restarts", 0) if cfg.mode == "train" else 0


def work(world: World, tree: dict, run_dir: str, given: bytes | None) -> None:
    """What each local worker runs. After a restart it resumes from the newest checkpoint."""
    from launchers.world import restarts
    from training.checkpoint.load import after_restart
    from training.run.rank import run
    from training.run.setup import unpack_given

    unpack_given(given)
    cfg, folder = to_config(tree), Path(run_dir)
    if restarts() > 0:
        after_restart(cfg, folder)
    run(cfg, folder, world)


def _lead(setup, run_dir: Path, world: World) -> None:
    """Rank 0 under torchrun or srun: tell the other ranks what to run and where."""
    from launchers.meeting import describe_places, rendezvous, tell
    from training.run.rank import run

    cfg = setup.cfg
    with rendezvous(world, cfg.parallel.timeout_s) as (store, places), _requeued(world):
        if stopping.wanted():
            raise Stopped("stopped before the first step")
        if store is not None:
            print(describe_places(places), flush=True)
            tell(store, _JOB, {"cfg": to_dict(cfg), "run_dir": os.path.abspath(run_dir)})
        run(cfg, run_dir, world, store, setup)


def follow(world: World, arguments: Sequence[str] = (), replaced: Callable[[Any], Any] = lambda cfg: cfg) -> None:
    """Run rank 0's job on another rank, under torchrun or srun.

    The configuration and the run directory are rank 0's, so that there is one of each. Prints nothing unless it fails.

    Args:
        world: Who this rank is.
        arguments: The command line: for a time-out that is typed there, as that of the configuration comes too late,
            and to judge what rank 0 sends.
        replaced: What a Python program makes of the configuration that the command line composes.
    """
    from launchers.meeting import hear, rendezvous
    from launchers.worker import redirect_output
    from training.run.rank import run

    console, timeout_s = os.dup(2), _typed_timeout(arguments)
    if world.origin == "torchrun":
        stopping.stop_without_parent()
    with rendezvous(world, timeout_s) as (store, places), _said_once(world, places):
        try:  # while rank 0 composes and prepares
            words = quote_values(arguments)
            own = compose_own(words, saved_config(words), replaced)
        except Exception as error:  # rank 0's own is to be heard first
            own = error
        job = hear(world, _JOB, timeout_s)
        if isinstance(own, Exception):
            raise own
        check_received(job["cfg"], job["run_dir"], own)
        cfg, run_dir = to_config(job["cfg"]), Path(job["run_dir"])
        redirect_output(run_dir / "logs", world.rank)
        try:
            with rendezvous(world, cfg.parallel.timeout_s), _requeued(world):
                run(cfg, run_dir, world, store)
        except Stopped:
            raise Stopped from None  # rank 0 says it
        except BaseException:
            os.dup2(console, 2)
            raise
        finally:
            sys.stdout.flush()


@contextmanager
def _said_once(world: World, places: Sequence[Place]) -> Iterator[None]:
    """Say what has ended rank 0 only where its own words are not seen: pods share no console, ranks of a machine do."""
    try:
        yield
    except EndedTogether as ended:
        mine, first = places[world.rank], places[0]
        said = world.origin == "environment" or (mine.leader and mine.machine != first.machine)
        raise EndedTogether(str(ended) if said else "", ended.exit_code) from None


def _typed_timeout(arguments: Sequence[str]) -> float:
    from conf.schema import Parallel

    typed = [word.partition("=")[2] for word in arguments if word.startswith("parallel.timeout_s=")]
    with suppress(ValueError):  # rank 0 says what is wrong with it
        return float(typed[-1]) if typed else Parallel.timeout_s
    return Parallel.timeout_s


def _requeued(world: World) -> AbstractContextManager:
    """A run in a user's batch script that was told to stop is queued again as the same job."""
    from launchers.slurm.task import requeued

    return requeued(world) if world.origin == "slurm" else nullcontext()


# -- what a checkpoint adds to a command, and what is said of it -----------------------------------------------------

_current: SavedConfig | None = None  # of the command that this process works on


def saved_config(arguments: Sequence[str]) -> SavedConfig | None:
    """See ``training.checkpoint.configuration.saved_config``, which is imported only where a checkpoint is named."""
    global _current
    _current = None
    if any(re.match(r"\+*(checkpoint|train\.resume)=", argument) for argument in arguments):
        from training.checkpoint import configuration

        _current = configuration.saved_config(arguments)
    return _current


def without_options_of_checkpoint(words: Sequence[str]) -> list[str]:
    """The words of a job that were typed, without those that a checkpoint has brought."""
    return [word for word in words if _current is None or word not in _current.words]


def completed(cfg: Any, hydra: Any, saved: SavedConfig | None = None) -> tuple[Any, Any]:
    """Complete what Hydra has composed by what the checkpoint knows that the command names (None: the last command).

    Returns:
        The configuration, and Hydra's own section with what was typed only. The files that Hydra has written agree.
    """
    saved = saved or _current
    if saved is None:
        return cfg, hydra
    hydra = hydra.copy()
    with flag_override(hydra, ["struct", "readonly"], False):
        hydra.overrides.task = [word for word in hydra.overrides.task if word not in saved.words]
    saved.lay_under(cfg, hydra.runtime.choices, OmegaConf.to_container(hydra.overrides, resolve=False)["task"])
    if hydra.output_subdir is not None:
        from training.reporting.run_directory import mask_files

        folder = Path(hydra.runtime.output_dir) / hydra.output_subdir
        OmegaConf.save(cfg, folder / "config.yaml")
        OmegaConf.save(hydra.overrides.task, folder / "overrides.yaml")
        mask_files([folder / "config.yaml", folder / "overrides.yaml"])
    return cfg, hydra


def to_text(cfg: Any, hydra: Any) -> str:
    """What a run says of its configuration: what was typed; with print_config=true, all of it.

    Args:
        cfg: The configuration as it was composed. Its references are not resolved: what was taken from the environment
            is shown as it was written.
        hydra: Hydra's own section.
    """
    from training.reporting.console import describe_configuration

    if cfg.print_config:
        return OmegaConf.to_yaml(OmegaConf.create(mask_secrets(to_dict(cfg)))).rstrip()
    chosen, changes = differences(cfg, hydra)
    return describe_configuration(chosen, mask_secrets(changes))
