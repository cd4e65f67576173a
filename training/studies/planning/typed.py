"""Lists the layouts that ``parallel=auto`` may choose, and checks the keys that the user types beside it.

Typed keys are checked before anything is measured, and the search keeps their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

from common.errors import PlanError, UserError
from conf import COMMAND
from conf.instantiate import to_dict
from conf.schema import Root
from data.dataset import DataSet
from models.chain import Chain
from parallel.axes import known_axes
from parallel.layout import Layout
from parallel.partition import partition_layers
from parallel.planning import check_groups, check_numbers
from parallel.strategies import strategy_info
from parallel.supported import check_facts, check_supported
from planner.layout import PlannedLayout, cut
from planner.search import FREE, Pool, layouts
from training.optimizer.checks import check_apart
from training.run.checks.model import check_one_backward
from training.run.prepare import BALANCES
from training.run.setup import Setup

_OF_SOME = ("shard", "reshard", "comm_hook")  # keys that only some strategies have


def fixed_of(cfg: Root) -> dict[str, Any]:
    """Return the layout keys that the user has set, for ``planner.search.layouts``.

    Raises:
        PlanError: If a number is impossible.
    """
    check_numbers(cfg.parallel)
    typed = {*cfg.get(COMMAND, {}).get("typed", ()), "parallel.shard", "parallel.reshard"}  # these are null by default
    if cfg.parallel.devices is not None:
        raise PlanError("parallel.devices is for strategies of one process, which parallel=auto does not choose")
    layout = Layout.of(cfg.parallel)
    keys = [key for key in (*FREE, *Layout.OPTIONS, "shard", "reshard") if f"parallel.{key}" in typed]
    fixed = {key: value for key in keys if (value := getattr(layout, key)) not in (None, "auto")}
    fixed |= {key: value for key in ("balance", "axes") if (value := getattr(layout, key)) not in ("uniform", ())}
    if cfg.train.activation_checkpointing or "train.activation_checkpointing" in typed:
        fixed["recompute"] = "full" if cfg.train.activation_checkpointing else "none"
    return fixed


def ways_to_divide(chain: Chain, data: DataSet, fixed: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """Return the ways in which ranks may divide the stages of a model, for ``planner.search.layouts``.

    See ``parallel.axes.axis.Axis.choices``.
    """
    typed = {"axes": fixed["axes"]} if "axes" in fixed else {}
    each = [axis.choices(chain, data, fixed, most) for axis in known_axes(Layout(**typed))]
    return [typed | {key: value for keys in some for key, value in keys.items()} for some in product(*each)]


def possible_layouts(
    setup: Setup, pools: Sequence[Pool], fixed: Mapping[str, Any], most: int
) -> dict[Pool, list[PlannedLayout]]:
    """Return the layouts that a run supports, by pool. Pools without supported layouts are left out.

    See ``planner.search.layouts``. At most ``most`` ranks divide a layer.

    Raises:
        PlanError: If no layout is supported, or the typed stages are impossible. The message gives the reason, or the
            nearest layout.
    """
    batch, balance, (layers, least) = setup.cfg.train.global_batch_size, fixed.get("balance", "time"), setup.work
    if balance not in BALANCES:
        partition_layers(setup.chain.names, len(balance) if isinstance(balance, tuple) else 1, balance, [])
    divided = ways_to_divide(setup.chain, setup.data, fixed, most)

    def having(given: Mapping[str, Any]) -> dict[Pool, list[PlannedLayout]]:
        return {pool: [*layouts(layers, batch, pool, divided, given, least)] for pool in pools}

    problem_of, every = _problems(setup), having(fixed)
    found = {pool: [layout for layout in each if not problem_of(layout)] for pool, each in every.items()}
    if any(found.values()):
        return {pool: supported for pool, supported in found.items() if supported}
    if refused := [layout for each in every.values() for layout in each]:
        # The error of a sharded layout explains the typed keys best.
        raise PlanError(problem_of(max(refused, key=lambda layout: layout.shards)))
    typed = [key for key in FREE if key in fixed]
    without_one = [having({other: value for other, value in fixed.items() if other != key}) for key in typed]
    near = [layout for by_pool in without_one for each in by_pool.values() for layout in each]
    numbers = [key for key in typed if key != "schedule"]
    nearest = min(near, key=lambda near: sum(abs(getattr(near, key) - fixed[key]) for key in numbers), default=None)
    said = " ".join(f"parallel.{key}={fixed[key]}" for key in typed)
    raise PlanError(
        f"train.global_batch_size={batch} and {len(layers)} layers on "
        f"{' or '.join(str(pool.devices) for pool in pools)} devices allow no layout"
        + (f" with {said}; " if said else "; choose a batch that more numbers divide")
        + (f"the nearest is {' '.join(nearest.words())}" if nearest else "leave some of that out" if said else "")
    )


def check_kept(saved: Layout, cfg: Root) -> None:
    """Check that the keys typed with parallel=auto agree with the checkpoint's layout.

    Raises:
        PlanError: If a key differs.
    """
    fixed = fixed_of(cfg)
    others = {key: fixed[key] for key in (*FREE, *Layout.OPTIONS) if key in fixed and fixed[key] != getattr(saved, key)}
    if others:
        wrong = " ".join(f"parallel.{key}={str(value).lower()}" for key, value in others.items())
        raise PlanError(
            f"parallel=auto keeps the checkpoint's layout, {' '.join(saved.words())}, and {wrong} is another: leave "
            "it out, or type the strategy too"
        )


def _problems(setup: Setup) -> Callable[[PlannedLayout], str]:
    """Return a function that tells why a layout does not support the model, the optimizer or the typed keys.

    The function returns a reason, which is empty if the layout supports all of them.
    """
    cfg, chain, found = setup.cfg, setup.chain, setup.examination
    skeleton, passed = chain.skeleton(), set()
    optimizer, parallel = to_dict(cfg.optim), to_dict(cfg.parallel)
    of_some = any(parallel[key] not in (None, "none") for key in _OF_SOME)

    def problem(layout: PlannedLayout) -> str:
        try:
            if layout.divides_model:
                check_apart(optimizer, layout.strategy)
            check_supported(layout, chain, skeleton, cut(chain.names, layout), passed)
            if cfg.train.compile:
                check_one_backward(layout)
            if of_some:
                mesh = replace(layout, shard=None).mesh()
                section = SimpleNamespace(**parallel | layout.keys())
                check_groups(section, strategy_info(layout.strategy), mesh, layout.nodes)
            check_facts(found, chain, layout, layout.recompute == "full")
        except UserError as error:
            return str(error)
        return ""

    return problem
