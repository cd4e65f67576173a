"""The keys of ``parallel`` that the user has typed beside ``parallel=auto``: checked before measuring, and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from common.errors import PlanError, UserError
from conf import COMMAND
from conf.instantiate import to_dict
from conf.schema import Root
from data.dataset import DataSet
from models.chain import Chain
from parallel.gathering import refuse_to_gather
from parallel.layout import Layout
from parallel.partition import partition_layers
from parallel.plan import check_cuts, check_groups, check_numbers, check_shardable, check_ties, single_numbers
from parallel.strategies import strategy_info
from planner.layout import PlannedLayout, cut
from planner.search import FREE, Pool, layouts
from training.optimizer.checks import check_apart
from training.run.checks.model import check_one_backward, check_sequences
from training.run.checks.samples import check_layer
from training.run.prepare import BALANCES
from training.run.setup import Setup

_OF_SOME = ("shard", "reshard", "comm_hook")  # keys that some strategies take


def fixed_of(cfg: Root) -> dict[str, Any]:
    """Return the keys of the layout that the user has set, for ``planner.search.layouts``.

    Raises:
        PlanError: A number is impossible.
    """
    check_numbers(cfg.parallel)
    typed = {*cfg.get(COMMAND, {}).get("typed", ()), "parallel.shard", "parallel.reshard"}  # these are null otherwise
    values = {key: cfg.parallel[key] for key in (*FREE, "sequence", "shard", "reshard") if f"parallel.{key}" in typed}
    fixed = {key: value for key, value in values.items() if value not in (None, "auto")}
    if cfg.train.activation_checkpointing or "train.activation_checkpointing" in typed:
        fixed["recompute"] = "full" if cfg.train.activation_checkpointing else "none"
    if (balance := Layout.of(cfg.parallel).balance) != "uniform":
        fixed["balance"] = balance
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


def possible_layouts(
    setup: Setup, pools: Sequence[Pool], fixed: Mapping[str, Any], most: int
) -> dict[Pool, list[PlannedLayout]]:
    """Return the layouts that a run supports, of each pool that has some. See ``planner.search.layouts``.

    Up to ``most`` ranks may share a layer.

    Raises:
        PlanError: There is none. The message says why, or names the nearest. Or the typed stages are not possible.
    """
    batch, balance, (layers, least) = setup.cfg.train.global_batch_size, fixed.get("balance", "time"), setup.work
    if balance not in BALANCES:
        partition_layers(setup.chain.names, len(balance) if isinstance(balance, tuple) else 1, balance, [])
    tensor = tensor_sizes(setup.chain, setup.data, fixed, most)

    def having(given: Mapping[str, Any]) -> dict[Pool, list[PlannedLayout]]:
        return {pool: [*layouts(layers, batch, pool, tensor, given, least)] for pool in pools}

    problem_of, every = _problems(setup), having(fixed)
    found = {pool: [layout for layout in each if not problem_of(layout)] for pool, each in every.items()}
    if any(found.values()):
        return {pool: supported for pool, supported in found.items() if supported}
    if refused := [layout for each in every.values() for layout in each]:
        # What a strategy that shares parameters has to say is nearer to what was meant.
        raise PlanError(problem_of(max(refused, key=lambda layout: layout.shards)))
    typed = [key for key in FREE if key in fixed]
    without_one = [having({other: value for other, value in fixed.items() if other != key}) for key in typed]
    near = [layout for by_pool in without_one for each in by_pool.values() for layout in each]
    nearest = min(near, key=partial(_distance, fixed), default=None)
    said = " ".join(f"parallel.{key}={fixed[key]}" for key in typed)
    raise PlanError(
        f"train.global_batch_size={batch} and {len(layers)} layers on "
        f"{' or '.join(str(pool.devices) for pool in pools)} devices allow no layout"
        + (f" with {said}; " if said else "; choose a batch that more numbers divide")
        + (f"the nearest is {' '.join(nearest.words())}" if nearest else "leave some of that out" if said else "")
    )


def _distance(fixed: Mapping[str, Any], layout: PlannedLayout) -> int:
    """Return by how much a layout's numbers differ from those that are fixed."""
    return sum(abs(getattr(layout, key) - fixed[key]) for key in FREE if key in fixed and key != "schedule")


def check_kept(saved: Layout, cfg: Root) -> None:
    """Check that the keys typed beside parallel=auto agree with the checkpoint's layout.

    Raises:
        PlanError: They do not.
    """
    fixed = fixed_of(cfg)
    others = {key: fixed[key] for key in (*FREE, "sequence") if key in fixed and fixed[key] != getattr(saved, key)}
    if others:
        wrong = " ".join(f"parallel.{key}={str(value).lower()}" for key, value in others.items())
        raise PlanError(
            f"parallel=auto keeps the checkpoint's layout, {' '.join(saved.words())}, and {wrong} is another: leave "
            "it out, or type the strategy too"
        )


def _problems(setup: Setup) -> Callable[[PlannedLayout], str]:
    """Return the function that tells why a layout does not support the model, the optimizer or the typed keys.

    It returns an empty string for a layout that supports them.
    """
    cfg, chain, found = setup.cfg, setup.chain, setup.examination
    gathers = bool(found.which("gathers"))
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
            if gathers and layout.chunks > 1:
                refuse_to_gather(layout)
            for facts in found.layers:
                check_layer(facts, layout, layout.recompute == "full")
        except UserError as error:
            return str(error)
        return ""

    return problem
