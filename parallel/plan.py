"""The layout of a run: which rank runs which layers, on which micro-batches.

``make_plan`` checks the rules between the keys of the section ``parallel``, before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from common.errors import PlanError
from models.chain import Chain, Layers, is_within
from models.cut import Columns, CutOf, Rows, Vocabulary, check_pairs, check_table, cut_of, example, is_divided
from models.losses import loss_of
from parallel.devices import Hardware
from parallel.layout import Layout
from parallel.mesh import REPLICAS, Mesh
from parallel.partition import partition_layers
from parallel.schedules import SCHEDULES, check_schedule, ideal_bubble
from parallel.strategies import StrategyInfo, names_where, strategy_info, suggest

HIERARCHICAL = ("hierarchical", "hierarchical_bf16")  # values of parallel.comm_hook
_MOST_THREADS = 1024  # of a process; with very many, OpenMP ends it by a segmentation fault


@dataclass(frozen=True)
class StagePlan:
    """One stage: its index, the names of its layers, and the number of its trainable parameters.

    ``frozen`` is the number of its other parameters. Both include this stage's copies of tied parameters.
    """

    index: int
    layers: tuple[str, ...]
    parameters: int
    frozen: int = 0

    @property
    def weights(self) -> int:
        """The number of all parameters."""
        return self.parameters + self.frozen


@dataclass(frozen=True, kw_only=True)
class Plan(Layout):
    """A layout whose keys all have values, and what follows from it for a model on some machines.

    ``schedule`` is None if one process runs all stages.

    Attributes:
        device_type: cpu, cuda or mps.
        precision: fp64, fp32, bf16 or fp16; auto in the plan of a run that another machine will start.
        stages: All stages, first to last.
        parameters: The number of trainable parameters of the model, a tied one counted once.
        global_batch_size: Samples per step over all replicas.
        gpus: The number of GPUs to which this command's ranks are assigned in turn; None if it starts none on GPUs.
        frozen: The number of parameters that are not trained, a tied one counted once.
        recompute: Whether activations are recomputed in the backward.
    """

    device_type: str
    precision: str
    stages: tuple[StagePlan, ...]
    parameters: int
    global_batch_size: int
    gpus: int | None = None
    frozen: int = 0
    recompute: bool = False

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Plan:
        """Read a plan from the result of ``dataclasses.asdict``, which may have been JSON meanwhile."""
        stages = tuple(StagePlan(**{**stage, "layers": tuple(stage["layers"])}) for stage in saved["stages"])
        return cls(**{**saved, "stages": stages, **{key: tuple(saved[key]) for key in ("balance", "devices")}})

    @property
    def shares_gpus(self) -> bool:
        """Whether several of the ranks that this command starts have the same GPU."""
        return self.gpus is not None and self.processes > self.gpus

    @property
    def microbatch_size(self) -> int:
        """The number of samples that pass through the model at a time."""
        return self.global_batch_size // (self.dp * self.chunks)

    @property
    def ideal_bubble(self) -> float | None:
        """The fraction of time that a balanced pipeline idles; None if there is no pipeline."""
        if self.schedule is None:
            return None
        return ideal_bubble(self.schedule, self.pp, self.chunks, self.per_rank)

    def manifest(self) -> dict[str, Any]:
        """Return the layout as it is kept in a checkpoint, for ``Layout.from_manifest``."""
        return {
            "parallel": self.strategy,
            **{axis: getattr(self, axis) for axis in Layout.AXES},
            "sequence": self.sequence,
            "shards": self.shards,
            "chunks": self.chunks,
            "schedule": self.schedule,
            "precision": self.precision,
            "stages": [list(stage.layers) for stage in self.stages],
        }

    def stages_of(self, position: int) -> list[StagePlan]:
        """Return the stages of a pipeline position: every ``pp``-th stage, or all stages if one process runs them."""
        return list(self.stages[position :: self.pp]) if self.pipelined else list(self.stages)


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
        world_size: The number of processes if they are started already (torchrun), otherwise None.
        nodes: The number of machines, with equally many processes each.
        hardware: The hardware of the machine that will run the plan; None for this machine.

    Returns:
        The plan.

    Raises:
        PlanError: If the keys contradict each other, the model or the machine.
    """
    info = strategy_info(parallel.name)
    check_numbers(parallel)
    _check_shape(parallel, info)
    wanted = Layout.of(parallel)
    ranks_per_replica = wanted.ranks_per_replica
    fixed = None if parallel.dp is None else parallel.dp * ranks_per_replica
    started_here = world_size is None and hardware is None
    hardware = hardware or Hardware.here(device, processes=1 if fixed == 1 else None)
    dp = _replicas(parallel.dp, ranks_per_replica, hardware, world_size)
    processes = dp * ranks_per_replica
    _check_world(processes, dp, wanted, hardware, world_size)
    chunks = parallel.chunks
    if chunks == "auto":
        raise PlanError("parallel.chunks=auto needs mode=train or mode=plan; set parallel.chunks to a number")
    _check_cut(global_batch_size, dp, chunks)

    if wanted.pipelined:
        check_schedule(parallel.schedule, wanted.pp, wanted.per_rank, chunks)
    skeleton = chain.skeleton()
    group, reshard = check_groups(parallel, info, replace(wanted, dp=dp, shard=None).mesh(), nodes)
    if info.sharded:
        check_shardable(parallel.name, single_numbers(skeleton))
    costs = [sum(p.numel() for p in layer.parameters()) for _, layer in skeleton.items()]
    if wanted.tp > 1:
        check_cuts(chain, skeleton, wanted.tp, wanted.sequence)
    runs = partition_layers(chain.names, wanted.pp * wanted.per_rank, parallel.balance, costs)
    if wanted.sequence:
        check_ties(chain, skeleton, runs)
    parameters, frozen = _count([skeleton])
    layout = replace(
        wanted,
        dp=dp,
        schedule=parallel.schedule if wanted.pipelined else None,
        stages_per_rank=wanted.per_rank,
        balance=tuple(map(len, runs)),
        shard=parallel.shard if info.shards == "all" else group if group > 1 else None,
        reshard=reshard,
        devices=_devices(parallel, info, hardware),
    )
    return Plan(
        **asdict(layout),
        device_type=hardware.device_type,
        precision=hardware.precision if precision == "auto" else precision,
        stages=_stages(skeleton, runs),
        parameters=parameters,
        global_batch_size=global_batch_size,
        gpus=hardware.count if started_here and hardware.device_type == "cuda" else None,
        frozen=frozen,
        recompute=recompute,
    )


def rebalanced(plan: Plan, chain: Chain, counts: Sequence[int]) -> Plan:
    """Return the plan with other numbers of layers in its stages."""
    runs, skeleton = partition_layers(chain.names, len(plan.stages), counts, []), chain.skeleton()
    if plan.sequence:
        check_ties(chain, skeleton, runs)
    return replace(plan, balance=tuple(counts), stages=_stages(skeleton, runs))


def _stages(skeleton: Layers, runs: Sequence[Sequence[str]]) -> tuple[StagePlan, ...]:
    return tuple(StagePlan(i, tuple(run), *_count(skeleton[name] for name in run)) for i, run in enumerate(runs))


def check_numbers(parallel) -> None:
    """Raise PlanError for numbers that no strategy accepts."""
    chunks = parallel.chunks
    if chunks != "auto" and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise PlanError(f"parallel.chunks={chunks} must be a whole number of at least 1, or auto")
    for key in ("dp", "tp", "pp", "stages_per_rank", "threads", "timeout_s", "bucket_mb"):
        value = getattr(parallel, key)
        if value is not None and not value > 0:
            least = "at least 1" if isinstance(value, int) else "above 0"
            raise PlanError(f"parallel.{key}={value} must be {least}")
    if (parallel.threads or 0) > _MOST_THREADS:
        raise PlanError(f"parallel.threads={parallel.threads} must be at most {_MOST_THREADS:,}")


def _check_shape(parallel, info: StrategyInfo) -> None:
    """Raise PlanError for numbers of replicas or stages that the strategy does not support."""
    name = parallel.name
    if not info.replicas and parallel.dp not in (None, 1):
        other = suggest(replicas=True, stages=info.stages)
        raise PlanError(f"parallel={name} has one replica; parallel.dp={parallel.dp} needs parallel={other}")
    if not info.stages and parallel.pp != 1:
        other = suggest(replicas=info.replicas, stages=True)
        raise PlanError(f"parallel={name} has one stage; parallel.pp={parallel.pp} needs parallel={other}")
    if not info.tensor and parallel.tp != 1:
        raise PlanError(
            f"parallel={name} leaves layers whole, and parallel.tp={parallel.tp} cuts them; use parallel=tensor, or "
            f"with replicas or stages parallel={', '.join(n for n in names_where(tensor=True) if n != 'tensor')}"
        )
    if info.only_tensor and parallel.tp == 1:
        raise PlanError(f"parallel={name} cuts layers among processes, and parallel.tp=1 is one; set parallel.tp=2")
    if parallel.sequence and parallel.tp == 1:
        raise PlanError("parallel.sequence=true divides the sequence among parallel.tp processes; set parallel.tp=2")
    if info.stage_per_rank and parallel.pp == 1:
        others = names_where(replicas=info.replicas, stages=False, shards=info.shards, several_devices=False)
        other = next(name for name in others if parallel.tp == 1 or strategy_info(name).tensor)
        raise PlanError(
            f"parallel={name} runs stages on ranks of their own, but parallel.pp=1 is one stage; use parallel={other}, "
            "or parallel.pp=2 or more"
        )
    if not info.stage_per_rank and parallel.stages_per_rank not in (None, 1):
        other = suggest(replicas=info.replicas, stages=True)
        raise PlanError(f"parallel={name} takes no parallel.stages_per_rank; parallel={other} does")


def _replicas(wanted: int | None, ranks_per_replica: int, hardware: Hardware, world_size: int | None) -> int:
    if wanted is not None:
        return wanted
    if world_size is not None:
        return max(1, world_size // ranks_per_replica)
    devices = hardware.count
    return 2 if devices is None else max(1, devices // ranks_per_replica)


def _check_world(processes: int, dp: int, wanted: Layout, hardware: Hardware, world_size: int | None) -> None:
    stages = wanted.ranks_per_replica // wanted.tp
    tensor = f" x parallel.tp={wanted.tp}" if wanted.tp > 1 else ""
    layout = f"parallel.dp={dp}{tensor} x parallel.pp={stages} = {processes} processes"
    if world_size is not None and world_size != processes:
        raise PlanError(
            f"{layout}, but {world_size} were started (WORLD_SIZE); start {processes}, or choose numbers whose "
            f"product is {world_size}"
        )
    if hardware.device_type == "mps" and processes > 1:
        raise PlanError(
            f"{layout}, but device=mps supports one process only; use one, or device=cpu for any number of processes"
        )


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
    """Return the numbers of trainable and of frozen parameters. Parameters that layers share are counted once."""
    parameters = {p for layer in layers for p in layer.parameters()}
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    return trainable, sum(p.numel() for p in parameters) - trainable


def _devices(parallel, info: StrategyInfo, hardware: Hardware) -> tuple[str, ...]:
    """Return the devices on which one process puts its stages or copies of the model; empty if ranks have one device.

    They are ``parallel.devices`` or, if it is not set, the GPUs in turn. Stages without a GPU are all put on the CPU.
    """
    device_type, count = hardware.device_type, hardware.count
    if info.gpu_only and device_type != "cuda":
        raise PlanError(
            f"parallel={parallel.name} runs on GPUs only, but device={device_type} has none; use "
            f"parallel={suggest(replicas=True, stages=info.stages)}, which runs on any device"
        )
    if not info.several_devices:
        if parallel.devices is not None:
            raise PlanError(
                f"parallel={parallel.name} uses one device per rank, and parallel.devices is only supported by "
                f"parallel={' and '.join(names_where(several_devices=True))}. Leave it out"
            )
        return ()
    for name in parallel.devices or ():
        kind, _, index = str(name).partition(":")
        if kind != device_type or (count is not None and index not in ("", *map(str, range(count)))):
            here = "" if count is None else f" (here {count} of them)"
            raise PlanError(
                f"parallel.devices names {name}, but all devices of a run must be of the type {device_type}{here}"
            )
    if not info.stages:
        return tuple(parallel.devices or (f"{device_type}:{i}" for i in range(count or 1)))
    if parallel.devices is None:
        return tuple(device_type if count is None else f"{device_type}:{i % count}" for i in range(parallel.pp))
    if len(parallel.devices) != parallel.pp:
        raise PlanError(
            f"parallel.devices names {len(parallel.devices)} devices for parallel.pp={parallel.pp} stages; name one "
            "per stage (the same one may be named twice)"
        )
    return tuple(parallel.devices)


def check_groups(parallel, info: StrategyInfo, mesh: Mesh, nodes: int) -> tuple[int, bool | None]:
    """Choose the number of replicas in a group, and whether shared parameters are gathered one layer at a time.

    The latter is None if replicas share no parameters. Raises PlanError.
    """
    name, dp, wanted = parallel.name, mesh.dp, parallel.shard
    hierarchical = parallel.comm_hook in HIERARCHICAL
    if info.sharded and parallel.comm_hook != "none":
        raise PlanError(
            f"parallel.comm_hook={parallel.comm_hook} needs replicas with parameters of their own, but "
            f"parallel={name} shares them. Leave it out"
            + (" (parallel=hsdp reduces gradients that way by itself)" if hierarchical else "")
        )
    if not info.sharded:
        _check_unused(parallel, hierarchical)
        if not hierarchical or dp == 1:
            return 1, None
    if wanted is None:
        group = dp if info.shards == "all" else _replicas_per_node(parallel, mesh, nodes)
    else:
        group = wanted
        if group < 1 or dp % group:
            sizes = ", ".join(str(n) for n in range(1 if dp == 1 else 2, dp + 1) if dp % n == 0)
            raise PlanError(
                f"parallel.shard={group} does not divide parallel.dp={dp} replicas into equal groups; "
                f"possible sizes are {sizes}"
            )
    if group == 1 and dp > 1 and info.sharded:
        raise PlanError(
            f"parallel={name} with groups of one replica shares nothing "
            + (f"(each of {nodes} nodes has one)" if wanted is None else "(parallel.shard=1)")
            + f"; set parallel.shard={dp} to share among all, or use parallel="
            + names_where(sharded=False, replicas=True, stages=info.stages)[0]
        )
    return group, _reshard(parallel, info)


def _check_unused(parallel, hierarchical: bool) -> None:
    known = " or ".join(f"parallel={name}" for name in names_where(sharded=True))
    if parallel.shard is not None and not hierarchical:
        raise PlanError(
            f"parallel.shard={parallel.shard} is a size of groups, but parallel={parallel.name} has none: it needs "
            f"{known}, or parallel.comm_hook=hierarchical. Leave it out"
        )
    if parallel.reshard is not None:
        raise PlanError(
            f"parallel.reshard={str(parallel.reshard).lower()} needs {known}, but parallel={parallel.name} shares no "
            "parameters. Leave it out"
        )


def _replicas_per_node(parallel, mesh: Mesh, nodes: int) -> int:
    per_node = mesh.size // nodes
    sizes = set()
    for ranks in mesh.groups(*REPLICAS):
        on = [rank // max(per_node, 1) for rank in ranks]
        sizes |= {on.count(node) for node in on}
    if mesh.size % nodes or len(sizes) != 1:
        raise PlanError(
            f"the {mesh.dp} replicas are not divided equally among the {nodes} nodes; set parallel.shard to the size "
            f"of the groups, such as parallel.shard={mesh.dp}"
        )
    return sizes.pop()


def _reshard(parallel, info: StrategyInfo) -> bool | None:
    if not info.sharded:
        return None
    if not info.stage_per_rank:
        return parallel.reshard is not False
    if parallel.reshard and SCHEDULES[parallel.schedule].splits_backward:
        raise PlanError(
            f"parallel.reshard=true is not supported with parallel.schedule={parallel.schedule}: the gradients of "
            "weights are computed when the layer's parameters are no longer whole, and would be lost. Leave it out, or "
            "use parallel.schedule=interleaved_1f1b"
        )
    return bool(parallel.reshard)


def check_cuts(chain: Chain, skeleton: Layers, tp: int, sequence: bool) -> None:
    """Check that a model can be cut among ``tp`` ranks that may share the sequence. Raises PlanError and ModelError."""
    if not chain.cut:
        raise PlanError(
            f"parallel.tp={tp} cuts layers, and this model does not say where: give its chain a table of the products "
            f"that are cut, cut={{{example(skeleton)}, …}} (docs/own_model.md, 'Tensor parallelism'), or set "
            "parallel.tp=1"
        )
    check_table(chain.cut, skeleton, chain.tied)
    for name, layer in skeleton.items():
        check_pairs(chain.cut, name, layer)
    modules = [(name, module, cut_of(chain.cut, name)) for name, module in skeleton.named_modules()]
    cuts = {name: (module, cut) for name, module, cut in modules if isinstance(cut, Columns | Rows | Vocabulary)}
    last = chain.names[-1]
    whole = len(chain.names) > 1 and not is_divided(chain.cut, chain.names, last, skeleton[last])
    if sequence and whole and loss_of(skeleton[last]) is not None:
        raise PlanError(
            f"parallel.sequence=true needs the vocabulary of {last} cut, whose loss gets a part of the sequence; add "
            "its projection to the chain's cut as Vocabulary(), or leave parallel.sequence out"
        )
    for name, (module, cut) in cuts.items():
        if _divides(tp, module, cut):
            continue
        parts = _parts(module, cut)
        if isinstance(cut, Vocabulary):
            raise PlanError(f"parallel.tp={tp} ranks cannot share the {parts} words of {name}")
        what = "inputs"
        if isinstance(cut, Columns):
            what = f"heads of {cut.unit} columns" if cut.unit > 1 else "columns"
        largest = max(_parts(*pair) for pair in cuts.values() if not isinstance(pair[1], Vocabulary))
        fits = [str(n) for n in range(2, largest + 1) if all(_divides(n, *pair) for pair in cuts.values())]
        raise PlanError(
            f"parallel.tp={tp} does not divide the {parts} {what} of {name}; parallel.tp can be {', '.join(fits) or 1}"
        )


def check_ties(chain: Chain, skeleton: Layers, stages: Iterable[Sequence[str]]) -> None:
    """Check that layers of a stage that share a whole parameter all have a part of the sequence, or all the whole one.

    Raises PlanError.
    """
    divided = {name: is_divided(chain.cut, chain.names, name, layer) for name, layer in skeleton.items()}
    for stage in stages:
        for pair in chain.tied.items():
            owners = [name for parameter in pair for name in stage if is_within(parameter, [name])]
            if len({divided[name] for name in owners}) > 1 and cut_of(chain.cut, pair[0].rpartition(".")[0]) is None:
                raise uneven(*pair)


def uneven(one: str, other: str) -> PlanError:
    """Return the error for a parameter of which ranks compute with parts of a tensor here and with the whole there."""
    return PlanError(
        f"parallel.tp: {one} and {other} are one parameter of which no rank has a part. Ranks compute with it for "
        "different parts of the samples in the one and for the whole in the other, so their gradients cannot be added "
        "up; leave parallel.sequence out, or set parallel.tp=1"
    )


def _parts(module: nn.Module, cut: CutOf) -> int:
    """Return how many heads, columns, inputs or words a module has that ranks can share."""
    if isinstance(cut, Columns):
        return cut.heads(module)
    return module.get_parameter("weight").shape[isinstance(cut, Rows)]


def _divides(tp: int, module: nn.Module, cut: CutOf) -> bool:
    """Return whether ``tp`` ranks can share a module: equally, except for words, of which each needs one."""
    parts = _parts(module, cut)
    if isinstance(cut, Vocabulary):
        return parts >= tp
    return parts % tp == 0 or (isinstance(cut, Columns) and cut.shared and tp % parts == 0)


def single_numbers(skeleton: nn.Module) -> list[str]:
    """Return the names of the parameters that have no rows to share."""
    return [name for name, parameter in skeleton.named_parameters() if parameter.dim() == 0]


def check_shardable(strategy: str, numbers: Sequence[str]) -> None:
    """Raise PlanError if a parameter has no rows to share: ``numbers`` are those of ``single_numbers``."""
    if numbers:
        raise PlanError(
            f"parallel={strategy} shares the rows of each parameter, but {numbers[0]} is a single number; give it the "
            "shape (1,)"
        )
