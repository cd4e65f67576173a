"""The registry of strategies and their properties, for the plan, the planner, verification and the tests.

A new strategy is an entry in ``STRATEGIES``, ``conf/parallel/NAME.yaml``, and, if no existing class runs it, a subclass
of ``parallel.strategy.Strategy``. A user's own strategy has ``parallel.strategy`` in place of the entry. A new order of
the work in a pipeline is not a strategy but a schedule (``parallel.schedules``). Each strategy obeys two rules:

* After each step the weights are the weights of ``single``. Checkpoints, ``mode=verify`` and ``parallel=auto`` rely on
  it. ``parallel=auto`` may choose any strategy of the registry, at the costs of its entry's properties (planner/).
* A class defines how a batch passes through the stages. How parameters and optimizer state are sharded is decided
  elsewhere: in ``parallel.axes.shards`` and ``training.optimizer``.

To add a configuration key, add it to ``conf.schema.Parallel``, and to ``parallel.layout.Layout`` or
``parallel.plan.Plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import PlanError


@dataclass(frozen=True)
class StrategyInfo:
    """The properties of a strategy.

    Attributes:
        class_path: The module and name of the class, which is imported on first use.
        replicas: Whether there may be several replicas (``parallel.dp``), each with an equal part of the batch.
        stages: Whether the model may be cut into several stages (``parallel.pp``).
        stage_per_rank: Whether stages run on separate ranks, under a schedule.
        several_devices: Whether one process computes on several devices (``parallel.devices``): one device per stage,
            or, without stages, one copy of the model per device.
        gpu_only: Whether the devices must be GPUs.
        tensor: Whether several ranks can divide the work of a stage (``Layout.OF_STAGE``).
        degree: The key of the degree that must be above 1, if the strategy is for one of these axes alone.
        shards: The replicas that shard parameters, gradients and optimizer state if ``parallel.shard`` is not set:
            "all", or the replicas of one "node". Empty if each replica has a whole copy.
    """

    class_path: str
    replicas: bool = False
    stages: bool = False
    stage_per_rank: bool = False
    several_devices: bool = False
    gpu_only: bool = False
    tensor: bool = False
    degree: str = ""
    shards: str = ""

    @property
    def has_workers(self) -> bool:
        """Whether a run may have several processes."""
        return bool(self.replicas or self.stage_per_rank or self.degree)

    @property
    def sharded(self) -> bool:
        """Whether replicas shard parameters, gradients and optimizer state."""
        return self.shards != ""


_LOCAL, _PIPELINE = "parallel.strategy:LocalStrategy", "parallel.pipeline:Pipeline"
STRATEGIES = {
    "single": StrategyInfo(_LOCAL),
    "model_parallel": StrategyInfo("parallel.several_devices:ModelParallel", stages=True, several_devices=True),
    "ddp": StrategyInfo(_LOCAL, replicas=True, tensor=True),
    "pipelined": StrategyInfo(_PIPELINE, stages=True, stage_per_rank=True, tensor=True),
    "pipe_ddp": StrategyInfo(_PIPELINE, replicas=True, stages=True, stage_per_rank=True, tensor=True),
    "fsdp": StrategyInfo(_LOCAL, replicas=True, tensor=True, shards="all"),
    "hsdp": StrategyInfo(_LOCAL, replicas=True, tensor=True, shards="node"),
    "pipe_fsdp": StrategyInfo(_PIPELINE, replicas=True, stages=True, stage_per_rank=True, tensor=True, shards="all"),
    "expert": StrategyInfo(_LOCAL, replicas=True, tensor=True, degree="ep"),
    "tensor": StrategyInfo(_LOCAL, tensor=True, degree="tp"),
    "context": StrategyInfo(_LOCAL, tensor=True, degree="cp"),
    "data_parallel": StrategyInfo("parallel.several_devices:DataParallel", several_devices=True, gpu_only=True),
}


OWN: dict[str, StrategyInfo] = {}  # the user's strategies, by parallel.strategy


def strategy_info(name: str) -> StrategyInfo:
    """Look up a strategy by its name. Raises PlanError if there is none."""
    if (info := STRATEGIES.get(name, OWN.get(name))) is None:
        known = ", ".join(STRATEGIES)
        raise PlanError(f"parallel={name} is not registered in parallel/strategies.py, which has {known}")
    return info


def names_where(**properties: bool | str) -> list[str]:
    """List the strategies that have these properties."""
    return [
        name
        for name, info in STRATEGIES.items()
        if all(getattr(info, key) == value for key, value in properties.items())
    ]


def suggest(*, replicas: bool, stages: bool) -> str:
    """Name a strategy for an error message."""
    in_turn = dict(stage_per_rank=stages, several_devices=False, gpu_only=False)
    return names_where(replicas=replicas, stages=stages, **in_turn)[0]


def types_workers(arguments: Sequence[str]) -> bool:
    """Return whether the words of a command line name a strategy with workers, before they are composed."""
    words = {key: value for key, _, value in (word.partition("=") for word in arguments)}
    elsewhere = {"launcher", "train.compile"} & words.keys() or any(word.startswith("-") for word in arguments)
    info = STRATEGIES.get(words.get("parallel", ""))
    return info is not None and info.has_workers and words.get("mode", "train") in ("train", "eval") and not elsewhere
