"""The keys of ``parallel`` that the user has typed beside ``parallel=auto``: checked before measuring, and kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from common.errors import PlanError, TrainingError, UserError
from conf import COMMAND
from conf.instantiate import to_dict
from data.dataset import DataSet
from models.chain import Chain
from parallel.layout import Layout
from parallel.partition import partition_layers
from parallel.plan import check_cuts, check_groups, check_numbers, check_shardable, check_ties, single_numbers
from parallel.strategies import strategy_info
from planner.layout import PlannedLayout, cut
from planner.search import FREE, Candidate, Found, layouts
from planner.work import Works
from training.optimizer.checks import check_apart
from training.run.checks.model import check_one_backward, check_sequences
from training.run.checks.samples import check_shapes
from training.run.prepare import BALANCES
from training.run.setup import Setup

# (devices of a node, devices, whether a layout must take all of them)
Room = tuple[int, int, bool]
_OF_SOME = ("shard", "reshard", "comm_hook")  # keys that some strategies take


def fixed_of(cfg: Any) -> dict[str, Any]:
    """Return the keys of the layout that the user has set, for ``planner.search.search``.

    Raises:
        PlanError: A number is impossible.
    """
    check_numbers(cfg.parallel)
    typed = cfg.get(COMMAND, {}).get("typed", ())
    keys = [key for key in FREE if f"parallel.{key}" in typed and cfg.parallel.get(key) not in (None, "auto")]
    fixed = {key: cfg.parallel[key] for key in keys}
    fixed |= {key: value for key in ("shard", "reshard") if (value := cfg.parallel[key]) is not None}
    if cfg.train.activation_checkpointing or "train.activation_checkpointing" in typed:
        fixed["recompute"] = "full" if cfg.train.activation_checkpointing else "none"
    if (balance := Layout.of(cfg.parallel).balance) != "uniform":
        fixed["balance"] = balance
    if "parallel.sequence" in typed:
        fixed["sequence"] = cfg.parallel.sequence
    if cfg.parallel.devices is not None:
        raise PlanError("parallel.devices is for strategies of one process, which parallel=auto does not choose")
    return fixed


def tensor_sizes(chain: Chain, data: DataSet, fixed: Mapping[str, Any], most: int) -> dict[int, bool]:
    """Return how many ranks can share each layer of a model: a fixed number, or 1 and those up to ``most``.

    The values are whether as many ranks can share each sequence of the data, which is prepared.

    Raises:
        PlanError: The fixed number is not possible.
    """
    skeleton, sizes = chain.skeleton(), {}

    def check(tp: int, sequence: bool) -> None:
        if tp > 1:
            check_cuts(chain, skeleton, tp, sequence)
        if sequence:
            check_sequences(data, tp)
            if "sequence" not in fixed:
                check_ties(chain, skeleton, [chain.names])

    for tp in [fixed["tp"]] if "tp" in fixed else range(1, 1 + (most if chain.cut else 1)):
        for sequence in sorted({fixed.get("sequence", False), tp > 1 and fixed.get("sequence", True)}):
            try:
                check(tp, sequence)
            except PlanError:
                if "tp" in fixed and tp not in sizes:
                    raise
                break
            sizes[tp] = sequence
    return sizes


def possible_rooms(
    cfg: Any, layers: Works, rooms: Sequence[Room], fixed: Mapping[str, Any], least: int,
    tensor: Mapping[int, bool], chain: Chain,
) -> list[Room]:  # fmt: skip
    """Return the rooms that allow a layout. See ``search`` for ``fixed``, ``least`` and ``tensor``.

    Raises:
        PlanError: There is none. The message says which numbers would be possible. Or the typed stages are not.
    """
    batch, balance = cfg.train.global_batch_size, fixed.get("balance", "time")
    if balance not in BALANCES:
        partition_layers(chain.names, len(balance) if isinstance(balance, tuple) else 1, balance, [])

    def having(given: Mapping[str, Any], some: Sequence[Room] = rooms) -> Iterator[PlannedLayout]:
        for per_node, devices, whole in some:
            yield from layouts(layers, per_node, batch, devices, tensor, given, least, whole)

    problem_of, found, problems = _problems(cfg, chain), [], {}
    for room in rooms:
        for layout in having(fixed, [room]):
            if not (problem := problem_of(layout)):
                found.append(room)
                break
            problems.setdefault(layout.shards > 1, problem)
    if found:
        return found
    if problems:  # what a strategy that shares parameters has to say is nearer to what was meant
        raise PlanError(problems.get(True) or problems[False])
    typed, possible = [key for key in FREE if key in fixed], {}
    for key in typed:
        without = having({other: value for other, value in fixed.items() if other != key})
        if values := {getattr(layout, "per_rank" if key == "stages_per_rank" else key) for layout in without}:
            possible[key] = ", ".join(map(str, sorted(values)))
    said = " ".join(f"parallel.{key}={fixed[key]}" for key in typed)
    devices = " or ".join(str(devices) for _, devices, _ in rooms)
    raise PlanError(
        f"train.global_batch_size={batch} and {len(layers)} layers on {devices} devices allow no layout"
        + (f" with {said}" if said else "; choose a batch that more numbers divide")
        + "".join(f"; possible are, for example, parallel.{key}={values}" for key, values in possible.items())
        + ("; leave some of that out" if said and not possible else "")
    )


def check_kept(saved: Layout, cfg: Any) -> None:
    """Check that the keys typed beside parallel=auto agree with the checkpoint's layout.

    Raises:
        PlanError: They do not.
    """
    keys = {key: getattr(saved, key) for key in (*FREE, "sequence")}
    typed = {key: value for key, value in fixed_of(cfg).items() if keys.get(key, value) != value}
    if typed:
        kept, wrong = (
            " ".join(f"parallel.{key}={str(value).lower()}" for key, value in some.items() if value is not None)
            for some in (keys, typed)
        )
        raise PlanError(
            f"parallel=auto keeps the checkpoint's layout, {saved.strategy} with {kept}, and {wrong} is "
            "another: leave it out, or type the strategy too"
        )


def accepted(found: Found, setup: Setup) -> Found:
    """Remove the layouts that do not support the model, the optimizer, train.compile or a typed key of ``_OF_SOME``.

    Raises:
        PlanError: No layout is left.
    """
    of_keys, of_layers = _problems(setup.cfg, setup.chain), _problems_of_layers(setup)

    def problem_of(candidate: Candidate) -> str:
        return of_keys(candidate.layout) or of_layers(candidate.layout)

    best = [candidate for candidate in found.best if not problem_of(candidate)]
    if not best:
        raise PlanError(f"of what fits, {problem_of(found.best[0])}")
    return replace(found, best=best, tried=found.tried - len(found.best) + len(best))


def _problems(cfg: Any, chain: Chain) -> Callable[[PlannedLayout], str]:
    """Return the function that tells why a layout does not support the model, the optimizer or the typed keys.

    It returns an empty string for a layout that supports them.
    """
    skeleton = chain.skeleton()
    numbers = single_numbers(skeleton)
    optimizer, parallel = to_dict(cfg.optim), to_dict(cfg.parallel)
    of_some = any(parallel[key] not in (None, "none") for key in _OF_SOME)

    def problem(layout: PlannedLayout) -> str:
        try:
            if layout.pp > 1 or layout.tp > 1 or layout.shards > 1:
                check_apart(optimizer, layout.strategy)
            if layout.info.sharded:
                check_shardable(layout.strategy, numbers)
            if layout.sequence:
                check_ties(chain, skeleton, cut(chain.names, layout))
            if cfg.train.compile:
                check_one_backward(layout)
            if of_some:
                mesh = Layout(layout.strategy, layout.dp, layout.pp, tp=layout.tp).mesh()
                section = SimpleNamespace(**parallel | layout.keys())
                check_groups(section, strategy_info(layout.strategy), mesh, layout.nodes)
        except (PlanError, TrainingError) as error:
            return str(error)
        return ""

    return problem


def _problems_of_layers(setup: Setup) -> Callable[[PlannedLayout], str]:
    """Return the function that tells what a run's ``check_shapes`` says of a layout: of layers with a state, for one.

    ``setup`` is that of one process. The function returns an empty string for a layout that the layers allow.
    """

    @cache
    def problem(strategy: str, dp: int, chunks: int, pp: int, recompute: bool) -> str:
        cfg, each = copy.deepcopy(setup.cfg), setup.plan.global_batch_size
        cfg.train.activation_checkpointing = recompute
        layout = {"strategy": strategy, "dp": dp, "chunks": chunks, "global_batch_size": each * dp * chunks}
        try:
            check_shapes(replace(setup, cfg=cfg, plan=replace(setup.plan, **layout, stages=setup.plan.stages * pp)))
        except UserError as error:
            return str(error)
        return ""

    if not (problem("fsdp", 2, 2, 2, True) or problem("ddp", 2, 1, 1, False)):  # the usual case
        return lambda layout: ""
    return lambda layout: problem(
        layout.strategy, min(layout.dp, 2), min(layout.chunks, 2), min(layout.pp, 2), layout.recompute == "full"
    )
