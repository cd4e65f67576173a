"""The registry of strategies and of their properties, for the plan, the planner, verification and the tests.

A new strategy is an entry in ``STRATEGIES``, ``conf/parallel/NAME.yaml``, and, if no existing class runs it, a subclass
of ``parallel.strategy.Strategy``. A strategy of the user has ``parallel.strategy`` in place of the entry. A new order
of the work in a pipeline is no strategy but a schedule (``parallel.schedules``). Two rules hold for each strategy:

* After each step it has the weights that ``single`` has. Checkpoints, ``mode=verify`` and ``parallel=auto`` rely on it.
  ``parallel=auto`` may choose any strategy of the registry, at the costs of its entry's properties (planner/).
* A class says how a batch passes through the stages. How ranks share parameters and optimizer state is decided
  elsewhere: in ``parallel.axes.shards`` and ``training.optimizer``.

To add a configuration key, add it to ``conf.schema.Parallel``, and to ``parallel.layout.Layout`` or
``parallel.plan.Plan``.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import PlanError


@dataclass(frozen=True)
class StrategyInfo:
    """The properties of a strategy.

    Attributes:
        class_path: Module and name of its class, which is imported when it is used.
        replicas: Whether there may be several replicas (``parallel.dp``), each with an equal part of the batch.
        stages: Whether the model may be cut into several stages (``parallel.pp``).
        stage_per_rank: Whether stages run on separate ranks, under a schedule.
        several_devices: Whether one process computes on several devices (``parallel.devices``): one device per stage,
            or, without stages, a copy of the model on each.
        gpu_only: Whether the devices must be GPUs.
        tensor: Whether ranks can split each layer (tensor parallelism).
        shards: Which replicas share parameters, gradients and optimizer state if ``parallel.shard`` is not set: "all",
            or those of one "node". Empty if each replica has its own.
    """

    class_path: str
    replicas: bool = False
    stages: bool = False
    stage_per_rank: bool = False
    several_devices: bool = False
    gpu_only: bool = False
    tensor: bool = False
    shards: str = ""

    @property
    def sharded(self) -> bool:
        """Whether replicas shard parameters, gradients and optimizer state."""
        return self.shards != ""

    @property
    def only_tensor(self) -> bool:
        """Whether tensor parallelism is the only parallelism."""
        return self.tensor and not (self.replicas or self.stages)


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
    "tensor": StrategyInfo(_LOCAL, tensor=True),
    "data_parallel": StrategyInfo("parallel.several_devices:DataParallel", several_devices=True, gpu_only=True),
}


OWN: dict[str, StrategyInfo] = {}  # of the user, by parallel.strategy


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
