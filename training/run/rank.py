"""One rank's whole run: connect to the other ranks, build the model, train or evaluate, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.errors import TrainingError, add_note, exit_is_failure, is_out_of_memory
from common.files import jsonable
from common.machine import collect_as_usual, styled, usable_cores
from conf import COMMAND, EVALUATES, TRAINED
from conf.instantiate import build, to_dict
from conf.masking import mask_secrets
from conf.schema import Root
from conf.words import hydra_word
from launchers import World
from launchers.meeting import rendezvous
from launchers.rank_0 import ready_together
from launchers.stopping import Stopped
from models.given import GIVEN, given_objects
from parallel.devices import keep_freed_memory, parameter_dtype
from parallel.host_group import NCCL, init_process_group
from parallel.mesh import Mesh
from parallel.strategy import Options, Strategy, build_strategy
from parallel.timeline import busy_seconds
from training.callbacks.averaging import averaging_of
from training.checkpoint.configuration import checkpoint_of
from training.checkpoint.files import Checkpoint, step_name
from training.checkpoint.init_from import Weights, not_drawn, start
from training.checkpoint.load import find_resumed, in_background, load, load_chosen, make_newest, names_in
from training.checkpoint.save import Checkpointer, check_savable, files_of
from training.optimizer import Optimizer
from training.reporting.console import describe_results, numbers, what_to_type
from training.reporting.loggers import Loggers, sections
from training.reporting.metrics import METRICS, SUMMARY, flat, read_object, truncate_after
from training.reporting.monitor import Monitor
from training.reporting.page import write_page
from training.reporting.recorder import Recorder
from training.reporting.summary import Outcome, RankResult, gather_results, summarize
from training.run.changes import changes, earlier_batches, follows_total
from training.run.checks.model import check_classes, named_checkpoint, reads_weights
from training.run.checks.ranks import check_nodes, check_ranks, check_run_directory, check_weights
from training.run.evaluate import evaluate_split
from training.run.loop import Loop
from training.run.prepare import adopt
from training.run.setup import Setup

# Another balance is suggested if the slowest rank of a pipeline computes this many times as long as the fastest.
_UNEVEN = 1.5
_CURVES_FROM = 20  # steps; importing matplotlib would take longer than many a shorter run


@exit_is_failure()
def run(
    setup: Setup, run_dir: Path, world: World | None = None, observe: Callable[[Loop], object] | None = None
) -> dict[str, Any]:
    """Train a model, or evaluate a checkpoint.

    Args:
        setup: The objects of the run, from ``prepare(cfg)`` or, if another process has planned the run, from
            ``build_setup``. The configuration has the ``mode`` "train", "eval" or "predict".
        run_dir: The existing run directory. Rank 0 writes there.
        world: This process's rank among all processes; None for a single process.
        observe: Gets the training loop before its first step.

    Returns:
        The content of summary.json, on every rank; empty for predictions.

    Raises:
        UserError: The run cannot start or continue.
        Stopped: The run was told to stop. Its trained weights are saved.
    """
    world, run_dir, cfg = world or World.alone(), Path(run_dir), setup.cfg
    adopt(cfg, world)
    if world.meeting is not None:  # ranks started one by one, whose machines may have to prepare the data
        ready_together(world.meeting, cfg.parallel.timeout_s)
    wanted, choose = cfg.train.resume if cfg.mode == "train" else None, lambda: None
    if wanted is not None and world.rank == 0:  # while the model is built, because reading checksums takes seconds
        choose = in_background(partial(find_resumed, wanted, run_dir / "checkpoints")).result
    with _strategy(setup, world) as strategy:
        if cfg.mode in EVALUATES:
            act = evaluate_checkpoint if cfg.mode == "eval" else predict_checkpoint
            return act(setup, strategy, run_dir)
        optim = to_dict(cfg.optim)
        if cfg.train.unfreeze and optim["_target_"].endswith(".SGD") and optim.get("momentum"):
            optim["fused"] = False  # torch's fused SGD needs the momentum of all parameters or of none (torch 2.13)
        optimizer = Optimizer(optim, strategy, averaging_of(cfg.callbacks))
        files = {} if cfg.train.checkpoint_every is None else files_of(strategy, optimizer)
        check_savable(files)
        _warn(strategy.mesh, check_run_directory(strategy.mesh, run_dir, bool(files), cfg.parallel.timeout_s))
        checkpoints = Checkpointer(
            run_dir / "checkpoints",
            strategy,
            optimizer,
            keep=cfg.train.keep_checkpoints,
            config=kept(cfg),
            check=partial(check_weights, strategy, cfg.launcher.allow_mixed),
        )
        resumed, done, ended = None, 0, False
        if wanted is not None:
            resumed = load_chosen(choose, strategy, optimizer)
        if resumed is not None:
            setup = replace(setup, earlier=earlier_batches(resumed, setup))
            ended = _has_ended(setup, resumed, own=checkpoints.resumed_from(resumed))
            # A skipped step has no checkpoint, and may have been the last step.
            done = max(resumed.step, (resumed.progress.get("ended_at") or 0) if ended else 0)
        if wanted is not None and world.rank == 0:
            make_newest(wanted, checkpoints.folder, resumed)
        if resumed is None and not setup.chain.unsaved:
            start(cfg.model, setup.chain, strategy)
        _warn(strategy.mesh, checkpoints.check())
        summary = _summary_of(strategy, run_dir, done) if ended else None
        recorder = _recorder(setup, strategy, run_dir, first_step=done + 1)
        checkpoints.warn = lambda words: recorder.say(f"warning: {words}")
        loop = Loop(setup, strategy, optimizer, checkpoints, recorder)
        if observe is not None:
            observe(loop)
        if resumed is not None:
            check_classes(resumed, setup.data)
            loop.restore(resumed, done, ended)

            def rate(total: int) -> float:
                return loop.schedule.factor(min(done + 1, total), total, setup.per_epoch)

            if (changed := changes(resumed.progress["recipe"], loop.recipe, rate)) is not None:
                recorder.say(f"warning: {changed}")
        if world.rank == 0 and not ended:
            with suppress(OSError):
                (run_dir / SUMMARY).unlink()  # the resumed run's summary, which describes fewer steps
        ranks = []
        try:
            if summary is None:
                collect_as_usual()  # everything is imported
                outcome = loop.run(done + 1)
                if cfg.train.checkpoint_every is None:  # otherwise each checkpoint was checked
                    _warn(strategy.mesh, checkpoints.check())
                test = _test(setup, strategy, loop)
                ranks = gather_results(strategy, outcome, optimizer.state_of)
                summary = summarize(setup, strategy, outcome, test, ranks)
                loop.callbacks.call("on_end", summary)
            else:
                recorder.say(f"step {done} was the last one and summary.json is written: nothing is left to do")
        finally:
            checkpoints.close()
            recorder.close(summary)
        assert summary is not None  # as nothing was raised
        if world.rank == 0:
            _report(setup, world, run_dir, loop.outcome, summary, ranks)
        return summary


def evaluate_checkpoint(setup: Setup, strategy: Strategy, run_dir: Path) -> dict[str, Any]:
    """Evaluate a checkpoint on the validation and the test split (``mode=eval``)."""
    step = load(checkpoint_of(setup.cfg), strategy).step
    _warn(strategy.mesh, check_weights(strategy, setup.cfg.launcher.allow_mixed))
    recorder = _recorder(setup, strategy, run_dir, first_step=1)
    results: dict[str, dict[str, float]] = {}
    summary = None
    try:
        for split in ("val", "test"):
            results[split] = evaluate_split(setup, strategy, split, recorder)
            if results[split]:
                recorder.say(numbers(results[split], setup.extents.get(split)))
        for result in filter(None, results.values()):  # only now: a stopped evaluation is repeated as a whole
            recorder.record({"step": step, **result})
        found, monitor = results["val"], Monitor.of(setup.cfg.train)
        outcome = Outcome(steps=step, best_val_loss=found.get("val_loss"), best=found.get(monitor.name))
        summary = summarize(setup, strategy, outcome, results["test"], gather_results(strategy, outcome))
        return summary
    finally:
        recorder.close(summary)


def predict_checkpoint(setup: Setup, strategy: Strategy, run_dir: Path) -> dict[str, Any]:
    """Write the outputs for a split (``mode=predict``)."""
    from training.run.predict import Restored, predict

    restored = Restored(setup.data, strategy, load(checkpoint_of(setup.cfg), strategy).step)
    _warn(strategy.mesh, check_weights(strategy, setup.cfg.launcher.allow_mixed))
    taken = predict(setup.cfg, restored, setup.cfg.predict.split, run_dir)
    if strategy.mesh.rank == 0:
        print(taken, flush=True)
    return {}


# -- before the training ---------------------------------------------------------------------------------------------


@contextmanager
def _strategy(setup: Setup, world: World) -> Iterator[Strategy]:
    """Connect the ranks and build this rank's part of the model."""
    if setup.plan.device_type == "cpu":
        held = setup.plan.stages_of(setup.plan.mesh(world.rank).position)
        keep_freed_memory(sum(stage.weights for stage in held) * parameter_dtype(setup.plan.precision).itemsize)
    with _process_group(world, setup):
        mesh = setup.plan.mesh(world.rank).connect(setup.cfg.parallel.timeout_s)
        if mesh.size > 1:
            _warn(mesh, check_ranks(mesh, setup, alike=world.origin == "local"))
            check_nodes(mesh, setup.plan, setup.cfg.parallel.shard, world.local_size)
        cfg, chain = setup.cfg, setup.chain
        saved = named_checkpoint(cfg)  # not that of train.resume=auto, of which every one may be damaged
        read = frozenset() if saved is None else names_in(saved)
        if reads_weights(cfg, chain):
            read |= Weights(cfg.model, chain).keys()
        chain = not_drawn(read, chain)
        options = Options(cfg.seed, cfg.parallel.timeout_s, cfg.train.compile)
        strategy = build_strategy(setup.plan, chain, mesh, options, setup.sample, world.local_rank)
        if chain.unsaved:
            start(cfg.model, chain, strategy)
        with closing(strategy):
            yield strategy


@contextmanager
def _process_group(world: World, setup: Setup) -> Iterator[None]:
    if world.size == 1:
        yield
        return
    timeout_s = setup.cfg.parallel.timeout_s
    with ExitStack() as stack:
        if world.meeting is None:
            world = stack.enter_context(rendezvous(world, timeout_s))
        device, store = setup.plan.device_type, world.meeting.store
        backend = init_process_group(device, world.rank, world.size, world.local_rank, store, timeout_s)

        def destroy(_, error: BaseException | None, trace: Any) -> None:
            # NCCL would first wait for pending operations and for its peers: an error would appear after timeout_s.
            if backend != NCCL or error is None or isinstance(error, Stopped):
                dist.destroy_process_group()

        def leave_together(_, error: BaseException | None, trace: Any) -> None:
            # A rank that leaves early would look to the others like one that died.
            if error is None or isinstance(error, Stopped):
                dist.barrier()
            elif is_out_of_memory(error) and not hasattr(error, "__notes__"):  # errors in a step have a note already
                add_note(error, f"rank {world.rank}")

        stack.push(destroy)
        stack.push(leave_together)
        yield


def _warn(mesh: Mesh, warning: str | None) -> None:
    if warning is not None and mesh.rank == 0:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _has_ended(setup: Setup, resumed: Checkpoint, own: bool) -> bool:
    """Return whether a resumed run has no steps left to train.

    If the run was killed after its last checkpoint, the work after the training is still to be done.

    Args:
        setup: The run.
        resumed: The checkpoint that the run resumes from.
        own: Whether the checkpoint is from the same run.

    Raises:
        TrainingError: No step is left, and the checkpoint is from another run or from a step after the last step.
    """
    total, epochs = setup.total_steps, setup.cfg.train.epochs
    if own and resumed.progress.get("ended_of") == total:  # a callback has ended the run
        return True
    if resumed.step > total or (resumed.step == total and not own):
        also = ""
        if epochs is not None and setup.batches().steps_until(epochs) <= resumed.step:
            also = f", and train.epochs=null: train.epochs={epochs:g} ends it, whatever train.steps is"
        raise TrainingError(
            f"the checkpoint is at step {resumed.step} and the run ends at step {total}; set train.steps higher{also}"
        )
    return resumed.step == total


def _summary_of(strategy: Strategy, run_dir: Path, step: int) -> dict[str, Any] | None:
    """Return the content of summary.json, which rank 0 reads; None if it is not from a run that ended with ``step``."""
    summary = read_object(run_dir / SUMMARY) if strategy.mesh.rank == 0 else None
    summary = strategy.mesh.gather(summary)[0]
    return summary if summary.get("steps") == step else None


def _recorder(setup: Setup, strategy: Strategy, run_dir: Path, first_step: int) -> Recorder:
    cfg, logger = setup.cfg, None
    evaluates = cfg.mode in EVALUATES  # an evaluation that is started again begins anew
    if strategy.mesh.rank == 0:
        if evaluates or cfg.train.resume is not None:  # before loggers read the file
            truncate_after(run_dir / METRICS, first_step - 1)
        supplied = {"run_dir": run_dir, "run_config": setup.shown, "run_name": f"{cfg.model.name}-{cfg.parallel.name}"}
        logger = Loggers(sections(cfg), partial(build, **supplied))
    return Recorder(run_dir, logger, 0 if evaluates else setup.total_steps, first_step)


# -- after the training ----------------------------------------------------------------------------------------------


def _test(setup: Setup, strategy: Strategy, loop: Loop) -> dict[str, Any]:
    """Return the results on the test split, with the tested weights: the last or the best ones.

    The results are empty if there is no test split, or if none of its targets counts.
    """
    if setup.cfg.train.eval_every is None:
        return {}
    folder, best, last = loop.checkpoints.folder, loop.outcome.best_step, loop.skipping.counted
    step = last if setup.cfg.train.test == "last" or best is None else best
    try:
        if step != last:
            load(folder / step_name(step), strategy)
        record = evaluate_split(setup, strategy, "test", loop.recorder)
    except Stopped:
        loop.stop(loop.outcome.steps)
    if step != last:
        load(folder / step_name(last), strategy)  # for callbacks
    tested = "last" if best is None else setup.cfg.train.test
    return record and {**record, "tested_weights": tested, "tested_step": step}


def _report(
    setup: Setup, world: World, run_dir: Path, outcome: Outcome, summary: dict, ranks: list[RankResult]
) -> None:
    """Draw the timeline, if train.trace is set and steps were trained; print the results; draw the curves."""
    if setup.cfg.train.trace and setup.plan.pipelined and outcome.seconds:
        from training.reporting.timeline import write_timeline  # it imports matplotlib

        intervals = [rank.intervals for rank in ranks]
        write_timeline(run_dir, setup.plan, setup.cfg.model.name, intervals, outcome.steps)
    headline, *rest = describe_results(summary, run_dir, setup.extents, _idle(setup, world, ranks)).split("\n")
    saved = None if outcome.checkpoint is None else outcome.checkpoint.parents[1]  # or the folder of the resumed run
    if saved is not None and saved.resolve() == run_dir.resolve() and setup.cfg.model._target_ != GIVEN:
        link = hydra_word(str(saved))
        length = [f"train.steps={2 * summary['steps']}", *["train.epochs=null"] * (setup.cfg.train.epochs is not None)]
        length += _rate_at_end(setup, summary["steps"])
        where = setup.cfg.get(COMMAND, {}).get("where", [])
        rest.append(what_to_type(link, length, where, python=given_objects() is not None))
    print("\n".join([styled(headline, "bold", sys.stdout), *rest]), flush=True)
    if outcome.steps >= _CURVES_FROM:
        from training.reporting.curves import write_curves  # it imports matplotlib

        write_curves(run_dir)
    write_page(run_dir)  # again, with the pictures that are drawn here


def _rate_at_end(setup: Setup, step: int) -> list[str]:
    """Return the overrides that keep the rate of ``step`` in a longer run; empty if none is needed."""
    schedule, optim = build("scheduler", setup.cfg.scheduler), setup.cfg.optim
    if not follows_total(schedule, setup.total_steps, setup.per_epoch):
        return []
    rates = {"optim": optim.lr, "optim.others": (optim.get("others") or {}).get("lr")}
    factor = schedule.factor(step, setup.total_steps, setup.per_epoch)
    return ["scheduler=constant", *(f"{key}.lr={lr * factor:.6g}" for key, lr in rates.items() if lr is not None)]


def _idle(setup: Setup, world: World, ranks: list[RankResult]) -> str:
    """Return why a pipeline idles far more than its schedule requires; empty if the reason is not known."""
    plan, cores = setup.plan, usable_cores()
    if plan.device_type == "cpu" and world.local_size > cores:
        return f"{world.local_size} processes take turns on {cores} core{'s' * (cores > 1)}"
    if not (ranks and plan.pipelined and setup.cfg.parallel.balance == "uniform"):
        return ""
    busy = busy_seconds([ranks[rank].intervals for rank in plan.mesh(0).pipeline(0)])
    slowest = plan.stages_of(busy.index(max(busy)))
    if max(busy) <= _UNEVEN * min(busy) or all(len(stage.layers) == 1 for stage in slowest):
        return ""
    seconds = " and ".join(f"{each:.3g}" for each in busy)
    return f"the ranks compute for {seconds} s of a step: parallel.balance=time evens out the stages"


def kept(cfg: Root) -> dict[str, Any]:
    """Return the part of a configuration that a checkpoint keeps: plain data without secrets and train.resume."""
    whole = to_dict(cfg)
    tree = jsonable({name: whole[name] for name in ("seed", *TRAINED)})
    tree["train"].pop("resume")
    more = {"choices": whole[COMMAND]["choices"]} if COMMAND in whole else {}
    more |= {key: whole[key] for key in ("recipe", "metrics") if whole.get(key) is not None}
    public = _public(tree, mask_secrets(tree))
    if left_out := flat(tree).keys() - flat(public).keys():
        more["left_out"] = sorted(left_out)
    return {**public, **more}


def _public(value: dict, masked: dict) -> dict:
    """Return ``value`` without the keys whose values were masked."""
    nested = {key: _public(item, masked[key]) for key, item in value.items() if isinstance(item, dict)}
    return {key: nested.get(key, item) for key, item in value.items() if key in nested or item == masked[key]}
