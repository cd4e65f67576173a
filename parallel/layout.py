"""A layout: the number of replicas and stages, and all other keys that decide where a number is computed.

Every layout in this project is a ``Layout``, whether it is read from or shown as the section ``parallel``, typed on a
command line, planned, compared, or kept in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from parallel.mesh import COPIES, EXPERTS, ORDERS, PEERS, PIPELINE, SHARDS, TENSOR, Mesh
from parallel.schedules import SCHEDULES
from parallel.strategies import StrategyInfo, strategy_info


@dataclass(frozen=True)
class Layout:
    """The keys of the section ``parallel`` (conf/schema.py) that decide where a number is computed.

    By default one process computes everything on one device, as with ``parallel=single``.

    Attributes:
        strategy: The name in the registry (``parallel.strategies``).
        dp: The number of replicas.
        tp: The number of ranks that split each layer.
        pp: The number of ranks of each pipeline, or of stages if one process runs all of them.
        chunks: The number of micro-batches per replica and step.
        schedule: The name in ``parallel.schedules``. It is ignored if one process runs all stages.
        stages_per_rank: The number of stages of each rank; None for the default of the schedule.
        balance: How layers are divided into stages: the name of a rule, or the number of layers of each stage.
        order: dp_pp or pp_dp, the numbering of the ranks.
        shard: The number of neighboring replicas in a group (``parallel.mesh``); None for all replicas that hold one
            copy.
        reshard: Whether sharded parameters are gathered one layer at a time. None means yes, except in pipelines.
        devices: The devices of the stages or copies that one process runs; empty to let the plan choose them.
        ep: The number of neighboring replicas that share the experts of the model.
        sequence: Whether the ranks that split layers also split the sequence between the products.
        cp: The number of ranks that divide each sequence.
        context: How these ranks exchange keys and values: gather, ulysses or ring.
        axes: The further axes of the mesh: for each axis its name, the module and name of its class, and its number of
            ranks.
    """

    DEGREES: ClassVar = ("dp", "tp", "pp", "cp")  # the keys whose product is the number of processes
    # The keys of the axes that divide the work of a stage: its degree, the axis of the mesh, and its other keys.
    OF_STAGE: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        "cp": ("context", ("context",)),
        "tp": (TENSOR, ("sequence",)),
    }
    OPTIONS: ClassVar = (*(option for _, options in OF_STAGE.values() for option in options), "ep")

    strategy: str = "single"
    dp: int = 1
    pp: int = 1
    chunks: int = 1
    schedule: str | None = "gpipe"
    stages_per_rank: int | None = None
    balance: str | tuple[int, ...] = "uniform"
    order: str = "dp_pp"
    shard: int | None = None
    reshard: bool | None = None
    devices: tuple[str, ...] = ()
    tp: int = 1
    sequence: bool = False
    ep: int = 1
    cp: int = 1
    context: str = "gather"
    axes: tuple[tuple[str, str, int], ...] = ()

    @classmethod
    def of(cls, section: Any) -> Layout:
        """Read a layout from a section ``parallel``. ``dp`` may be None and ``chunks`` "auto" until they are chosen."""
        keys = {key: getattr(section, key) for key in _KEYS}
        balance = keys["balance"]
        keys["balance"] = balance if isinstance(balance, str | int | None) else tuple(balance)
        keys["axes"] = tuple((name, axis["_target_"], axis["ranks"]) for name, axis in (section.axes or {}).items())
        return cls(**{**keys, "strategy": section.name, "devices": tuple(section.devices or ())})

    @classmethod
    def from_manifest(cls, saved: Mapping[str, Any]) -> Layout:
        """Read a layout from a checkpoint's manifest (``Plan.manifest``). Old manifests have no schedule.

        Further axes are not read, because a checkpoint must not name code.
        """
        stages, schedule = saved["stages"], saved.get("schedule")
        return cls(
            strategy=saved["parallel"],
            **{axis: saved.get(axis, 1) for axis in cls.DEGREES},
            **{option: saved[option] for option in cls.OPTIONS if option in saved},
            chunks=saved["chunks"],
            schedule=schedule,
            stages_per_rank=len(stages) // saved["pp"] if schedule else None,
            balance=tuple(len(layers) for layers in stages),
        )

    def section(self) -> dict[str, Any]:
        """Return the keys of the section ``parallel`` that a layout has. This is the inverse of ``of``."""
        keys = {key: getattr(self, key) for key in _KEYS}
        balance, devices = [*self.counts] or self.balance, [*self.devices] or None
        axes = {name: {"_target_": path, "ranks": ranks} for name, path, ranks in self.axes} or None
        return {"name": self.strategy, **keys, "balance": balance, "devices": devices, "axes": axes}

    def keys(self) -> dict[str, Any]:
        """Return the keys of the section ``parallel`` that a planner chooses. It leaves the other keys as they are."""
        keys = {"name": self.strategy, "dp": self.dp, "pp": self.pp, "chunks": self.chunks}
        keys |= self.divided
        if self.pipelined and self.schedule is not None:
            keys |= {"schedule": self.schedule, "stages_per_rank": self.per_rank if self.looped else None}
        return keys

    def words(self) -> list[str]:
        """Return the words of a command line that set ``keys``."""
        words = [f"parallel={self.strategy}"]
        words += [f"parallel.dp={self.dp}"] if self.info.replicas else []
        words += [f"parallel.{key}={str(value).lower()}" for key, value in self.divided.items() if value is not False]
        words += [f"parallel.axes.{name}.ranks={ranks}" for name, _, ranks in self.axes]
        if self.pipelined:
            words += [f"parallel.pp={self.pp}"]
            words += [f"parallel.schedule={self.schedule}"] if self.schedule is not None else []
            words += [f"parallel.stages_per_rank={self.per_rank}"] if self.looped else []
        return [*words, f"parallel.chunks={self.chunks}"]

    @property
    def name(self) -> str:
        """The layout's name, such as ``pipe_ddp dp=2 pp=2 gpipe chunks=4``."""
        degrees = [(axis, getattr(self, axis)) for axis in (*self.DEGREES, "ep")]
        degrees += [(name, n) for name, _, n in self.axes]
        words = [self.strategy, *(f"{axis}={n}" for axis, n in degrees if n > 1)]
        words += [self.schedule] if self.pipelined and self.schedule is not None else []
        words += [f"x{self.per_rank}"] if self.per_rank > 1 else []
        words += [key for key, value in self.divided.items() if value is True]
        words += [value for value in self.divided.values() if isinstance(value, str)]
        return " ".join([*words, f"chunks={self.chunks}"])

    @property
    def divided(self) -> dict[str, Any]:
        """The keys of the axes along which several ranks divide a stage's work or its experts, with their values."""
        several = {key: options for key, (_, options) in self.OF_STAGE.items() if getattr(self, key) > 1}
        keys = [key for degree, options in several.items() for key in (degree, *options)] + ["ep"] * (self.ep > 1)
        return {key: getattr(self, key) for key in keys}

    @cached_property
    def info(self) -> StrategyInfo:
        """The strategy's entry in the registry."""
        return strategy_info(self.strategy)

    @cached_property
    def pipelined(self) -> bool:
        """Whether stages run on separate ranks, not all in one process."""
        return self.info.stage_per_rank

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed at different times."""
        return self.pipelined and self.schedule is not None and SCHEDULES[self.schedule].splits_backward

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis of the mesh, by the axis's name, slowest axis first."""
        group = SHARDS if self.info.sharded else PEERS
        stages = self.pp if self.pipelined else 1
        each = max(1, self.group // self.ep)
        sizes = {COPIES: self.dp // (each * self.ep), group: each, EXPERTS: self.ep, PIPELINE: stages}
        sizes = {name: sizes.get(name, 1) for name in ORDERS[self.order]}
        sizes |= {name: getattr(self, degree) for degree, (name, _) in self.OF_STAGE.items()}
        return sizes | {name: n for name, _, n in self.axes}

    @property
    def ranks_per_stage(self) -> int:
        """The number of ranks that compute the same samples with the same layers, all or a part of each."""
        return math.prod([*map(self.__getattribute__, self.OF_STAGE), *(ranks for *_, ranks in self.axes)])

    @property
    def ranks_per_replica(self) -> int:
        """The number of ranks that compute the same samples, each with a part of the model."""
        return self.ranks_per_stage * (self.pp if self.pipelined else 1)

    @property
    def divides_model(self) -> bool:
        """Whether no rank has the whole model."""
        return self.pipelined or self.tp > 1 or self.ep > 1 or self.shards > 1

    @property
    def processes(self) -> int:
        """The number of ranks."""
        return self.dp * self.ranks_per_replica

    def mesh(self, rank: int = 0) -> Mesh:
        """Return the mesh of ranks, seen from ``rank``."""
        return Mesh(self.sizes, rank)

    @cached_property
    def group(self) -> int:
        """The number of neighboring replicas that reduce gradients within their group first."""
        return self.shard or (self.dp if self.info.sharded else 1)

    @property
    def shards(self) -> int:
        """The number of ranks among which one copy of the parameters is sharded; 1 if each rank has a whole copy."""
        return self.group if self.info.sharded else 1

    @property
    def looped(self) -> bool:
        """Whether the schedule runs several stages on a rank."""
        return self.schedule is not None and SCHEDULES[self.schedule].looped

    @property
    def per_rank(self) -> int:
        """The number of stages of each rank."""
        if not self.pipelined:
            return 1
        return self.stages_per_rank or (2 if self.looped else 1)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of layers of each stage; empty if ``balance`` is the name of a rule."""
        return self.balance if isinstance(self.balance, tuple) else ()


_KEYS = [key.name for key in fields(Layout) if key.name != "strategy"]  # the section has the same names for these
