"""The ``parallel=`` options: one schema, six settings of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore

SCHEDULES = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble",
    "planned", "zbv_zero_bubble", "dualpipev",  # the last two: known, and refused with the reason
)  # fmt: skip
Schedule = Enum("Schedule", {name: name for name in SCHEDULES})


class Order(Enum):
    dp_pp = "dp_pp"
    pp_dp = "pp_dp"


class CommHook(Enum):
    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class Parallel:
    name: str = "single"
    dp: int | None = 1  # replicas; null: as many as the devices allow (on a CPU: 2)
    pp: int = 1  # stages, one process each (times stages_per_rank); model_parallel: all in one process
    chunks: Any = 1  # micro-batches per replica and step; where nothing is pipelined: gradient accumulation; auto
    schedule: Schedule = Schedule.gpipe  # order of forwards and backwards in a pipeline
    stages_per_rank: int | None = None  # null: what the schedule needs (interleaved, looped, planned: 2, else 1)
    balance: Any = "uniform"  # how layers are dealt to stages: uniform, time or size (measured), or [7,7]
    order: Order = Order.dp_pp  # dp_pp: the ranks of a pipeline are neighbours; pp_dp: those of a stage are
    devices: list[str] | None = None  # model_parallel: one a stage, such as [cuda:0,cuda:1]; data_parallel: all of them
    threads: int | None = None  # CPU threads of each process; null: the cores, divided
    timeout_s: float = 300.0  # the longest that a rank waits for another before the run ends
    bucket_mb: float = 25.0  # DistributedDataParallel's gradient bucket, in MiB
    comm_hook: CommHook = CommHook.none  # what gradients are sent as between replicas: none (as they are), bf16, fp16
    sync_batchnorm: bool = False  # BatchNorm over the replicas' micro-batches together
    env: Any = None  # environment of the workers, such as {NCCL_DEBUG: INFO, GLOO_SOCKET_IFNAME: eth0}


def register(store: ConfigStore) -> None:
    store.store(group="schema", name="parallel", node=Parallel)
