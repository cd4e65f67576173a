"""Construction of the plan of a run.

``make_plan`` checks the rules between the keys of the section ``parallel`` before any process starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from torch import nn

from common.errors import PlanError
from models.chain import LOSS, Chain, Layers
from parallel.axes import known_axes
from parallel.axes.replicas import HIERARCHICAL
from parallel.devices import Hardware
from parallel.examination import Examination
from parallel.layout import Layout
from parallel.mesh import REPLICAS, Mesh
from parallel.partition import partition_layers
from parallel.plan import Plan, StagePlan
from parallel.schedules import SCHEDULES, check_schedule
from parallel.strategies import StrategyInfo, names_where, strategy_info, suggest
from parallel.supported import check_supported

_MOST_THREADS = 1024  # per process; with very many threads OpenMP crashes with a segmentation fault


def make_plan(
    parallel,
    chain: Chain,
    *,
    global_batch_size: int,
    device: str,
    precision: str,
    recompute: bool = False,
    world_size: int | None = None,
    nodes: int = 1,
    hardware: Hardware | None = None,
) -> Plan:
    """Make the plan of a run, and check it.

    Args:
        parallel: The configuration section.
        chain: The model.
        global_batch_size: Samples per step over all replicas.
        device: auto, cpu, cuda or mps.
        precision: auto, fp64, fp32, bf16 or fp16.
        recompute: Whether activations are recomputed in the backward.
        world_size: The number of processes if they already run (torchrun), otherwise None.
        nodes: The number of machines. Each runs the same number of processes.
        hardware: The hardware of the machine that will run the plan; None for this machine.

    Returns:
        The plan.

    Raises:
        PlanError: If a key contradicts another key, the model or the machine.
    """
    info = strategy_info(parallel.name)
    check_numbers(parallel)
    wanted = Layout.of(parallel)
    for axis in known_axes(wanted):
        axis.check_keys(parallel, info)
    started_here = world_size is None and hardware is None
    hardware = hardware or Hardware.here(device, alone=parallel.dp == wanted.ranks_per_replica == 1)
    if (dp := parallel.dp) is None:
        available = hardware.count if world_size is None else world_size
        dp = 2 if available is None else max(1, available // wanted.ranks_per_replica)
        dp = max(1, dp // wanted.ep) * wanted.ep
    wanted = replace(wanted, dp=dp)
    _check_world(wanted, hardware, world_size)
    chunks = parallel.chunks
    if chunks == "auto":
        raise PlanError("parallel.chunks=auto needs mode=train or mode=plan; set parallel.chunks to a number")
    _check_cut(global_batch_size, dp, chunks)

    if wanted.pipelined:
        check_schedule(parallel.schedule, wanted.pp, wanted.per_rank, chunks)
    skeleton = chain.skeleton()
    group, reshard = check_groups(parallel, info, replace(wanted, shard=None).mesh(), nodes)
    costs = [sum(p.numel() for p in layer.parameters()) for _, layer in skeleton.items()]
    stages = partition_layers(chain.names, wanted.pp * wanted.per_rank, parallel.balance, costs)
    check_supported(wanted, chain, skeleton, stages)
    parameters, frozen = _count([skeleton])
    layout = replace(
        wanted,
        schedule=parallel.schedule if wanted.pipelined else None,
        stages_per_rank=wanted.per_rank,
        balance=tuple(map(len, stages)),
        shard=parallel.shard if info.shards == "all" else group if group > 1 else None,
        reshard=reshard,
        devices=_devices(parallel, info, hardware),
    )
    return Plan(
        **asdict(layout),
        device_type=hardware.device_type,
        precision=hardware.precision if precision == "auto" else precision,
        stages=_stages(skeleton, stages),
        parameters=parameters,
        global_batch_size=global_batch_size,
        **Examination([*chain.names, LOSS]).for_plan(),
        gpus=hardware.count if started_here and hardware.device_type == "cuda" else None,
        frozen=frozen,
        recompute=recompute,
        **{key: getattr(parallel, key) for key in ("comm_hook", "bucket_mb", "sync_batchnorm")},
    )


def rebalanced(plan: Plan, chain: Chain, counts: Sequence[int]) -> Plan:
    """Return a copy of the plan with other numbers of layers in its stages."""
    stages, skeleton = partition_layers(chain.names, len(plan.stages), counts, []), chain.skeleton()
    check_supported(plan, chain, skeleton, stages)
    return replace(plan, balance=tuple(counts), stages=_stages(skeleton, stages))


def _stages(skeleton: Layers, runs: Sequence[Sequence[str]]) -> tuple[StagePlan, ...]:
    return tuple(StagePlan(i, tuple(run), *_count(skeleton[name] for name in run)) for i, run in enumerate(runs))


def check_numbers(parallel) -> None:
    """Raise PlanError for numbers that no strategy accepts, and for axis names that are already in use."""
    if taken := {*(parallel.axes or ())} & {*Layout.DEGREES, *Layout().sizes, *Layout().section(), "parallel"}:
        raise PlanError(f"parallel.axes.{taken.pop()} has the name of an axis of this program; choose another")
    chunks = parallel.chunks
    if chunks != "auto" and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise PlanError(f"parallel.chunks={chunks} must be a whole number of at least 1, or auto")
    for key in (*Layout.DEGREES, "ep", "stages_per_rank", "threads", "timeout_s", "bucket_mb"):
        value = getattr(parallel, key)
        if value is not None and not value > 0:
            least = "at least 1" if isinstance(value, int) else "above 0"
            raise PlanError(f"parallel.{key}={value} must be {least}")
    if (parallel.threads or 0) > _MOST_THREADS:
        raise PlanError(f"parallel.threads={parallel.threads} must be at most {_MOST_THREADS:,}")


def _check_world(wanted: Layout, hardware: Hardware, world_size: int | None) -> None:
    processes, numbers = wanted.processes, {f"parallel.{key}": getattr(wanted, key) for key in Layout.DEGREES}
    numbers["parallel.pp"] = wanted.pp if wanted.pipelined else 1
    numbers |= {f"parallel.axes.{name}.ranks": ranks for name, _, ranks in wanted.axes}
    shown = (f"{key}={n}" for key, n in numbers.items() if n > 1 or key in ("parallel.dp", "parallel.pp"))
    layout = f"{' x '.join(shown)} = {processes} processes"
    if world_size is not None and world_size != processes:
        raise PlanError(
            f"{layout}, but {world_size} were started (WORLD_SIZE); start {processes}, or choose numbers whose "
            f"product is {world_size}"
        )
    if hardware.device_type == "mps" and processes > 1:
        raise PlanError(f"{layout}, but device=mps supports one process only; use one, or device=cpu for any number")


def _check_cut(batch: int, dp: int, chunks: int) -> None:
    parts = dp * chunks
    if batch >= 1 and batch % parts == 0:
        return
    below, above = batch // parts * parts, max(batch // parts + 1, 1) * parts
    nearest = f"the nearest that can are {below} and {above}" if below > 0 else f"the smallest that can is {above}"
    raise PlanError(
        f"train.global_batch_size={batch} cannot be cut into dp={dp} x chunks={chunks} equal micro-batches; {nearest}"
    )


def _count(layers: Iterable[nn.Module]) -> tuple[int, int]:
    """Return the number of trainable and of frozen parameters. Parameters that layers share are counted once."""
    parameters = {p for layer in layers for p in layer.parameters()}
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    return trainable, sum(p.numel() for p in parameters) - trainable


def _devices(parallel, info: StrategyInfo, hardware: Hardware) -> tuple[str, ...]:
    """Return the devices on which one process puts its stages or copies of the model; empty for one device per rank.

    The devices are ``parallel.devices`` or, if it is not set, the GPUs in turn. Without GPUs, all stages are on the
    CPU.
    """
    name, named, device_type, count = parallel.name, parallel.devices, hardware.device_type, hardware.count
    other = suggest(replicas=True, stages=info.stages)
    if info.gpu_only and device_type != "cuda":
        raise PlanError(f"parallel={name} runs on GPUs only, but device={device_type} has none; use parallel={other}")
    if not info.several_devices:
        if named is not None:
            raise PlanError(
                f"parallel={name} uses one device per rank, and parallel.devices is only supported by "
                f"parallel={' and '.join(names_where(several_devices=True))}. Leave it out"
            )
        return ()
    if parallel.axes:
        raise PlanError(
            f"parallel={name} runs in one process, and parallel.axes divides the work among several; use "
            f"parallel={other}, or leave parallel.axes out"
        )
    for device in named or ():
        kind, _, index = str(device).partition(":")
        if kind != device_type or (count is not None and index not in ("", *map(str, range(count)))):
            here = "" if count is None else f" (here {count} of them)"
            raise PlanError(
                f"parallel.devices names {device}, but all devices of a run must be of the type {device_type}{here}"
            )
    wanted = parallel.pp if info.stages else count or 1
    if named and info.stages and len(named) != wanted:
        raise PlanError(
            f"parallel.devices names {len(named)} devices for parallel.pp={wanted} stages; name one per stage"
        )
    return tuple(named or (device_type if count is None else f"{device_type}:{i % count}" for i in range(wanted)))


def check_groups(parallel, info: StrategyInfo, mesh: Mesh, nodes: int) -> tuple[int, bool | None]:
    """Return the number of replicas in a group, and whether sharded parameters are gathered one layer at a time.

    The second value is None if parameters are not sharded. Raises PlanError.
    """
    name, dp, group = parallel.name, mesh.dp, parallel.shard
    hierarchical = parallel.comm_hook in HIERARCHICAL
    if info.sharded and parallel.comm_hook != "none":
        raise PlanError(
            f"parallel.comm_hook={parallel.comm_hook} needs replicas with parameters of their own, but "
            f"parallel={name} shares them. Leave it out"
            + (" (parallel=hsdp reduces gradients that way by itself)" if hierarchical else "")
        )
    if not info.sharded:
        sharded = " or ".join(f"parallel={name}" for name in names_where(sharded=True))
        if group is not None and not hierarchical:
            raise PlanError(
                f"parallel.shard={group} is a size of groups, but parallel={name} has none: it needs {sharded}, or "
                "parallel.comm_hook=hierarchical. Leave it out"
            )
        if parallel.reshard is not None:
            raise PlanError(
                f"parallel.reshard={str(parallel.reshard).lower()} needs {sharded}, but parallel={name} shares no "
                "parameters. Leave it out"
            )
        if not hierarchical or dp == 1:
            return 1, None
    if group is None:
        group = dp if info.shards == "all" else _replicas_per_node(mesh, nodes)
    elif group < 1 or dp % group:
        sizes = ", ".join(str(n) for n in range(1 if dp == 1 else 2, dp + 1) if dp % n == 0)
        raise PlanError(
            f"parallel.shard={group} does not divide parallel.dp={dp} replicas into equal groups; possible sizes are "
            f"{sizes}"
        )
    if group % parallel.ep:
        raise PlanError(
            f"parallel.ep={parallel.ep} does not divide the {group} replicas of a group; set parallel.shard to a "
            f"multiple of {parallel.ep}, or leave it out"
        )
    if not info.sharded:
        return group, None
    if group == 1 and dp > 1:
        why = f"each of {nodes} nodes has one" if parallel.shard is None else "parallel.shard=1"
        other = names_where(sharded=False, replicas=True, stages=info.stages)[0]
        raise PlanError(
            f"parallel={name} with groups of one replica shares nothing ({why}); set parallel.shard={dp} to share "
            f"among all, or use parallel={other}"
        )
    if not info.stage_per_rank:
        return group, parallel.reshard is not False
    if parallel.reshard and SCHEDULES[parallel.schedule].splits_backward:
        raise PlanError(
            f"parallel.reshard=true is not supported with parallel.schedule={parallel.schedule}: the gradients of "
            "weights are computed when the layer's parameters are no longer whole, and would be lost. Leave it out, or "
            "use parallel.schedule=interleaved_1f1b"
        )
    return group, bool(parallel.reshard)


def _replicas_per_node(mesh: Mesh, nodes: int) -> int:
    per_node = max(1, mesh.size // nodes)
    sizes = {n for ranks in mesh.groups(*REPLICAS) for n in Counter(rank // per_node for rank in ranks).values()}
    if mesh.size % nodes or len(sizes) != 1:
        raise PlanError(
            f"the {mesh.dp} replicas are not divided equally among the {nodes} nodes; set parallel.shard to the size "
            f"of the groups, such as parallel.shard={mesh.dp}"
        )
    return sizes.pop()
