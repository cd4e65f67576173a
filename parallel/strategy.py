"""What every strategy is: a share of the model, and a step that all ranks take together.

Subclasses say how a batch passes through the stages (``in_process``, ``pipeline``); what happens around that is here,
once: scaling the loss, summing tied gradients, agreeing on the numbers of the step, clipping.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.batch import Batch
from models.chain import Chain
from parallel.batchnorm import RunningStatistics
from parallel.gradients import Gradients, sum_dtype
from parallel.mesh import Mesh
from parallel.plan import Plan
from parallel.precision import LossScale, autocast, parameter_dtype
from parallel.replicate import replicate
from parallel.stage import Stage
from parallel.tied import TiedParameters
from parallel.timeline import Timeline


@dataclass(frozen=True)
class Options:
    """How stages are run, whatever the layout. ``bucket_mb``: DDP's bucket in MiB; ``comm_hook``: what gradients are
    sent as (none | bf16 | fp16); ``timeout_s``: the longest that a rank waits for another."""

    seed: int
    timeout_s: float = 300.0
    bucket_mb: float = 25.0
    comm_hook: str = "none"
    sync_batchnorm: bool = False
    recompute: bool = False
    compile: bool = False


@dataclass(frozen=True)
class StepResult:
    """The same on every rank. ``loss``: mean over the ``terms`` of the global batch (tokens that are no padding, for
    a language model); ``grad_norm``: of the whole model, tied weights once, before clipping; ``stop``: some rank asked
    to stop; ``spike``: the loss is above the limit that was given."""

    loss: float
    grad_norm: float
    stop: bool
    terms: float
    spike: bool = False

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def usable(self) -> bool:
        """Whether the weights may be updated."""
        return self.finite and not self.spike


class Strategy(ABC):
    """A rank's part in training ``chain`` as ``plan`` lays it out. Every rank of the mesh constructs one."""

    def __init__(
        self, plan: Plan, chain: Chain, mesh: Mesh, devices: Sequence[torch.device], options: Options
    ) -> None:
        self.plan, self.chain, self.mesh, self.options = plan, chain, mesh, options
        self.device = devices[0]
        self.timeline = Timeline()
        self.loss_scale = LossScale(enabled=plan.precision == "fp16")
        self.stages = [
            Stage(
                chain,
                stage.layers,
                seed=options.seed,
                device=devices[i % len(devices)],
                dtype=parameter_dtype(plan.precision),
                recompute=options.recompute,
            )
            for i, stage in enumerate(plan.stages_of(mesh.position))
        ]
        if options.compile:
            for stage in self.stages:
                stage.compile()
        self.tied = TiedParameters(plan, chain, self.stages, mesh, options.timeout_s)
        self.gradients = Gradients(self.stages, chain, mesh, self.device)
        self.statistics = RunningStatistics(self.stages, plan.chunks, mesh.dp_group)
        if options.sync_batchnorm:
            self.statistics.synchronise()

    # -- the step --------------------------------------------------------------------------------------------------

    def train_step(
        self, batch: Batch, step: int, stop: bool = False, loss_limit: float = math.inf
    ) -> StepResult:
        """Forward and backward of this replica's batch in ``plan.chunks`` micro-batches.

        batch       this replica's equal share of the global batch (on any device)
        step        counts from 1; dropout depends on it
        stop        this rank's wish to end the run; the result says whether any rank has it
        loss_limit  a larger loss is a spike; the same on every rank
        returns     numbers over the global batch; gradients are in place, averaged, summed over tied copies, unscaled.
                    Where they are not ``usable``, BatchNorm's running statistics are as before
        """
        batch = self._place(batch)
        terms = batch.targets.numel()
        self.zero_grad()
        self.timeline.start_step()
        # DDP averages over replicas and the global mean divides by dp x terms, so each divides by its own terms.
        with self._step(training=True, step=step, loss_scale=self.loss_scale.factor / terms):
            self._forward_backward(batch)
        self.timeline.end_step()
        self.tied.sum_gradients()
        result = self._agree(terms, stop, loss_limit)
        self.statistics.update(result.usable)
        return result

    def eval_step(self, batch: Batch) -> Tensor:
        """[loss sum, count, metric sums…] of this replica's batch in float64; zeros where this rank has no loss.

        No gradients; add the vectors of all batches up and give them to ``all_sum``.
        """
        batch = self._place(batch)
        with torch.no_grad(), self._step(training=False):
            self._forward(batch)
        return self._take_sums()

    @abstractmethod
    def _forward_backward(self, batch: Batch) -> None:
        """Run the batch through this rank's stages, forward and backward, leaving averaged gradients."""

    @abstractmethod
    def _forward(self, batch: Batch) -> None:
        """Run the batch through this rank's stages without gradients."""

    def _agree(self, terms: int, stop: bool, loss_limit: float) -> StepResult:
        """The step's one small all-reduce: loss, count, squared norm and the stop flag together.

        A number that is not finite on one rank makes the sum not finite on all, so all take the same decision.
        """
        loss, count, *_ = self._take_sums()
        has_loss = any(stage.ends_chain for stage in self.stages)
        local = torch.stack(
            [
                loss,
                count,
                torch.full_like(loss, terms if has_loss else 0),
                self.gradients.squared_norm().to(loss),
                torch.full_like(loss, stop),
            ]
        )
        loss, count, assumed, squares, stops = self.all_sum(local)
        # Gradients were divided by the number of terms; where some were padding, by too many.
        factor = assumed / count if count else 1.0
        factor /= self.loss_scale.factor
        self.gradients.multiply(factor)
        norm = math.sqrt(squares) * factor if math.isfinite(squares) else math.nan
        mean = loss / count if count else math.nan
        return StepResult(mean, norm, stops > 0, count, spike=mean > loss_limit)

    def all_sum(self, vector: Tensor) -> list[float]:
        """``vector`` added up over all ranks; the same numbers on every rank."""
        if self.mesh.size > 1:
            dist.all_reduce(vector)
        return vector.tolist()

    def sum_of(self, *numbers: float) -> list[float]:
        """Each of a few numbers added up over all ranks, who call it together."""
        return self.all_sum(torch.tensor(numbers, dtype=sum_dtype(self.device), device=self.device))

    def grad_norm(self) -> float:
        """The norm of the whole model's gradients as they stand. All ranks call it together."""
        return math.sqrt(self.all_sum(self.gradients.squared_norm()[None])[0])

    def clip_grad_norm_(self, max_norm: float, norm: float) -> None:
        """Scale gradients so that their norm, which is ``norm`` now, is at most ``max_norm`` (as
        ``nn.utils.clip_grad_norm_`` does)."""
        self.gradients.multiply(min(1.0, max_norm / (norm + 1e-6)))

    def clip_grad_value_(self, limit: float) -> None:
        """Clamp every gradient element to [-limit, limit]."""
        self.gradients.clamp(limit)

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        self.gradients.clear()

    # -- this rank's share -----------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every parameter that this rank updates, copies of tied ones included."""
        for stage in self.stages:
            yield from stage.layers.parameters()

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """(global name, parameter) of what this rank updates; a copy of a tied one has its canonical name."""
        return [
            (self.chain.canonical(name), parameter)
            for stage in self.stages
            for name, parameter in stage.layers.named_parameters()
        ]

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank's stages under global names; a tied parameter only where it is at home
        (so that the ranks' shares of one replica make up the model, each tensor once)."""
        return {
            name: tensor
            for stage in self.stages
            for name, tensor in stage.layers.state_dict().items()
            if name not in self.chain.tied
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's share out of ``state``, which may hold any part of the model, or all of it.

        Raises KeyError naming what is missing, ValueError naming what has another shape.
        """
        for stage in self.stages:
            for name, tensor in stage.layers.state_dict().items():
                canonical = self.chain.canonical(name)
                if canonical not in state:
                    raise KeyError(f"{canonical} is not among the {len(state)} tensors given")
                given = state[canonical]  # once: it may be read from a file here
                if given.shape != tensor.shape:
                    raise ValueError(f"{canonical} has {tuple(given.shape)}, expected {tuple(tensor.shape)}")
                tensor.copy_(given)

    def close(self) -> None:
        """Let go of what refers to process groups, before they are destroyed."""
        self.stages.clear()

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _replicate(self, stage: Stage) -> nn.Module:
        """``stage`` under DistributedDataParallel where there are replicas and something to average."""
        return replicate(stage, self.mesh.dp_group, self.options.bucket_mb, self.options.comm_hook)

    @contextmanager
    def _step(self, **how) -> Iterator[None]:
        """One autocast context over all of a step, so that weights are cast once and not once a micro-batch."""
        for stage in self.stages:
            stage.begin(**how)
        try:
            with autocast(self.plan.precision, self.device.type):
                yield
        finally:
            for stage in self.stages:
                stage.end()

    def _microbatch_indices(self) -> Tensor:
        """[chunks] indices of this replica's micro-batches in the global batch."""
        return torch.arange(self.plan.chunks) + self.mesh.replica * self.plan.chunks

    def _place(self, batch: Batch) -> Batch:
        batch = batch.to(self.device, non_blocking=True)
        dtype = parameter_dtype(self.plan.precision)
        return Batch(*(_as_float(t, dtype) for t in (batch.inputs, batch.targets, batch.weights)))

    def _take_sums(self) -> Tensor:
        width = 2 + len(self.chain.loss.metrics)
        total = torch.zeros(width, dtype=sum_dtype(self.device), device=self.device)
        for stage in self.stages:
            sums = stage.take_sums()
            if sums is not None:
                total += sums.to(self.device)
        return total


def _as_float(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor
