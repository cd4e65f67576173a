"""The plan of a run: all decisions about its layout, in the form that every rank gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel.layout import Layout
from parallel.schedules import ideal_bubble


@dataclass(frozen=True)
class StagePlan:
    """One stage: its index, the names of its layers, and the number of its trainable parameters.

    ``frozen`` is the number of its frozen parameters. Both numbers include this stage's copies of tied parameters.
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
    """A layout with a value for each key, and its consequences for a model on some machines.

    ``schedule`` is None if one process runs all stages.

    Attributes:
        device_type: cpu, cuda or mps.
        precision: fp64, fp32, bf16 or fp16; auto in the plan of a run that will start on another machine.
        stages: All stages, first to last.
        parameters: The number of trainable parameters of the model. A tied parameter counts once.
        global_batch_size: Samples per step over all replicas.
        gpus: The number of GPUs to which this command's ranks are assigned in turn; None if the command starts no ranks
            on GPUs.
        frozen: The number of frozen parameters. A tied parameter counts once.
        recompute: Whether activations are recomputed in the backward.
        comm_hook: How replicas send gradients: none, bf16, fp16, hierarchical or hierarchical_bf16.
        bucket_mb: The size of the buckets in which replicas average gradients, in MiB.
        sync_batchnorm: Whether BatchNorm normalizes over the micro-batches of all replicas together.
        facts: The names of layers, by fact of ``parallel.examination``. "draws" and "passes" have the layers for which
            the fact is true. "writes", "fills" and "random" also have the layers for which the fact is unknown.
            "auxiliary" has those with an auxiliary loss. ``LOSS`` stands for the loss. "changes" has the tensors that
            each forward changes.
        sample_dims: The dimensions of samples of each tensor that the loss gets from the model; empty if unknown.
        auxiliary: The number of sums of each key of ``models.auxiliary``.
    """

    device_type: str
    precision: str
    stages: tuple[StagePlan, ...]
    parameters: int
    global_batch_size: int
    facts: Mapping[str, Sequence[str]]
    gpus: int | None = None
    frozen: int = 0
    recompute: bool = False
    comm_hook: str = "none"
    bucket_mb: float = 25.0
    sync_batchnorm: bool = False
    sample_dims: Sequence[Sequence[int]] = ()
    auxiliary: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Plan:
        """Read a plan from the result of ``dataclasses.asdict``, also after a round trip through JSON."""
        stages = tuple(StagePlan(**{**stage, "layers": tuple(stage["layers"])}) for stage in saved["stages"])
        axes = tuple((name, path, ranks) for name, path, ranks in saved["axes"])
        read = {key: tuple(saved[key]) for key in ("balance", "devices")}
        return cls(**{**saved, "stages": stages, "axes": axes, **read})

    @property
    def shares_gpus(self) -> bool:
        """Whether several of the ranks that this command starts use the same GPU."""
        return self.gpus is not None and self.processes > self.gpus

    @property
    def microbatch_size(self) -> int:
        """The number of samples in a micro-batch."""
        return self.global_batch_size // (self.dp * self.chunks)

    @property
    def ideal_bubble(self) -> float | None:
        """The fraction of time that a balanced pipeline idles; None if there is no pipeline."""
        if self.schedule is None:
            return None
        return ideal_bubble(self.schedule, self.pp, self.chunks, self.per_rank)

    def manifest(self) -> dict[str, Any]:
        """Return the layout for the manifest of a checkpoint. ``Layout.from_manifest`` reads it."""
        return {
            "parallel": self.strategy,
            **{axis: getattr(self, axis) for axis in Layout.DEGREES},
            **{name: ranks for name, _, ranks in self.axes},
            **{option: getattr(self, option) for option in Layout.OPTIONS},
            "shards": self.shards,
            "chunks": self.chunks,
            "schedule": self.schedule,
            "precision": self.precision,
            "stages": [list(stage.layers) for stage in self.stages],
        }

    def stages_of(self, position: int) -> list[StagePlan]:
        """Return the stages of a pipeline position: every ``pp``-th stage, or all stages if one process runs them."""
        return list(self.stages[position :: self.pp]) if self.pipelined else list(self.stages)
