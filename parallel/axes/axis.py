"""The base class of all axes: the questions that an axis answers about how its ranks divide the work of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import PlanError
from data.dataset import Batch, DataSet
from models.chain import Chain, Layers
from parallel.examination import Examination
from parallel.layout import Layout
from parallel.mesh import Mesh
from parallel.placement import Split
from parallel.plan import Plan
from parallel.strategies import StrategyInfo, names_where

Apart = Mapping[nn.Parameter, Sequence[str]]  # parameters not averaged over all replicas -> their axes of averaging


class Collective(NamedTuple):
    """A collective that a layer calls for each micro-batch.

    Attributes:
        kind: "all_reduce"; "all_gather"; "reduce_scatter"; "all_to_all"; "ring", in which each rank sends a tensor to
            the next rank.
        times: The number of calls in a forward.
        numbers: The number of elements per sample: of the gathered tensor for an all-gather, otherwise of the tensor
            that a rank gives.
        backward: The number of calls in a backward.
    """

    kind: str
    times: int
    numbers: float
    backward: int

    def sent(self, ranks: int) -> float:
        """Return the number of elements per sample that each of ``ranks`` ranks sends in one call."""
        if self.kind == "ring":
            return self.numbers
        return self.numbers * (ranks - 1) / ranks * (2 if self.kind == "all_reduce" else 1)


class Axis:
    """A way to divide the work of a step among ranks.

    This class divides nothing: the ranks along the axis hold the same tensors and compute the same numbers, and the
    first rank counts and saves them. A subclass overrides the methods for which its ranks differ. The class methods are
    called before a run, for any layout. The other methods are called by each rank of a run that has several ranks along
    the axis.

    Attributes:
        mesh_axes: The axes of the mesh that belong to this class. The mesh axis of a class from ``parallel.axes`` has
            the name of its key there.
        keys: The attributes of a layout that ``check`` reads.
        variants: The values of ``keys``, with two ranks, that ``mode=verify`` compares if the model has a table of
            cuts. Not used for an axis from ``parallel.axes``.
        divides_batch: Whether the ranks along the axis compute different terms of the loss.
        hint: A possible cause, as a sentence, for the error that ranks hold different weights; empty if there is none.
        ranks: The ranks along the axis, including this rank.
    """

    mesh_axes: ClassVar[tuple[str, ...]] = ()
    keys: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[tuple[dict[str, Any], ...]] = ()
    divides_batch: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    # -- before a run ------------------------------------------------------------------------------------------------

    @classmethod
    def check_keys(cls, section: Any, info: StrategyInfo) -> None:
        """Check the axis's keys of the section ``parallel`` against the strategy's properties. Raises PlanError."""

    @classmethod
    def is_used(cls, layout: Layout) -> bool:
        """Return whether a layout has several ranks along the axes of this class."""
        return any(layout.sizes[name] > 1 for name in cls.mesh_axes)

    @classmethod
    def check(cls, layout: Layout, chain: Chain, skeleton: Layers) -> None:
        """Check that the axis can divide a model. Raises PlanError or ModelError."""

    @classmethod
    def check_stages(cls, layout: Layout, chain: Chain, skeleton: Layers, stages: Iterable[Sequence[str]]) -> None:
        """Check that the axis can divide stages, each given by the names of its layers. Raises PlanError."""

    @classmethod
    def check_facts(cls, layout: Layout, chain: Chain, found: Examination, recompute: bool = False) -> None:
        """Check that the axis can divide the layers and the loss that an examination has observed. Raises PlanError.

        ``recompute`` is whether activations are recomputed in the backward.
        """

    @classmethod
    def check_data(cls, layout: Layout, data: DataSet) -> None:
        """Check that the axis can divide the samples of a prepared data set. Raises PlanError."""

    @classmethod
    def allows(cls, info: StrategyInfo, layout: Layout) -> bool:
        """Return whether ``parallel=auto`` tries a strategy with the layout's number of ranks along the axis."""
        return True

    @classmethod
    def choices(cls, chain: Chain, data: DataSet, fixed: Mapping[str, Any], max_ranks: int) -> list[dict[str, Any]]:
        """Return the values of the axis's keys that ``parallel=auto`` may choose.

        Args:
            chain: The model.
            data: The prepared data set.
            fixed: The values that the user has typed.
            max_ranks: The largest number of ranks.

        Raises:
            PlanError: If a typed value is not possible.
        """
        return [{}]

    @classmethod
    def work_of_rank(cls, layout: Layout, work: Any) -> Any:
        """Return one rank's part of a layer's work, a ``planner.work.LayerWork``."""
        return work

    @classmethod
    def collectives(cls, layout: Layout, work: Any) -> Sequence[Collective]:
        """Return the collectives of a layer along the axis. ``work`` is divided along all other axes."""
        return ()

    @classmethod
    def boundary(cls, layout: Layout, x: Tensor) -> Tensor:
        """Return one rank's part of a tensor, without memory, that a stage sends to the next stage."""
        return x

    @classmethod
    def describe(cls, layout: Layout) -> str:
        """Return a line for the console; empty if there is none."""
        return ""

    @classmethod
    def across_nodes(cls, layout: Layout, nodes: int, sent: float) -> str | None:
        """Return a warning if ranks along the axis span several nodes and send too much; None otherwise.

        ``sent`` is in bytes per layer.
        """
        return None

    # -- in a rank ---------------------------------------------------------------------------------------------------

    def __init__(self, name: str, plan: Plan, chain: Chain, mesh: Mesh) -> None:
        """Describe the ranks along the axis ``name`` of a connected mesh."""
        self.ranks, self.plan, self.chain, self.mesh = mesh.axis(name), plan, chain, mesh
        self.splits: dict[str, Split] = {}  # of the parameters of which ``prepare`` keeps a part, by canonical name

    def part_of_batch(self, batch: Batch) -> Batch:
        """Return this rank's part of the batch of its replica, or of one of its micro-batches."""
        return batch

    def whole_output(self, x: Tensor) -> Tensor:
        """Return the last layer's output, or targets, for the batch of the replica, from those for ``part_of_batch``.

        The ranks along the axis call this together.
        """
        return x

    def step(self) -> AbstractContextManager:
        """Return a context for the forwards and backwards of a step of training or evaluation."""
        return nullcontext()

    def prepare(self, name: str, layer: nn.Module, tied_in_stage: Sequence[str]) -> None:
        """Replace a layer's parameters by this rank's part, in place.

        ``tied_in_stage`` has the names of the stage's tied parameters.
        """

    def wrap(self, stage: nn.Module, apart: Apart) -> nn.Module:
        """Wrap a stage after its layers are prepared. Return the module to call instead of the stage.

        ``apart`` has the results of all axes' ``averaged_over`` for the stage's parameters.
        """
        return stage

    def averaged_over(self, name: str) -> Sequence[str] | None:
        """Return the replica axes over which the gradient of a parameter is summed; None for all replica axes.

        The sum is divided by the number of replicas. If the result is ``()``, no rank sends the gradient, and this
        axis's ``finish_gradients`` may complete it. The result must be None for sharded parameters. ``name`` is the
        parameter's canonical name.
        """
        return None

    def split(self, name: str, tensor: Tensor) -> Split | None:
        """Return the division of a tensor along the axis; None if each rank has the whole tensor.

        The tensor is a parameter, its gradient or its optimizer state. ``name`` is the parameter's canonical name.
        """
        return self.splits.get(name)

    def before_backward(self, stages: Iterable[nn.Module], last: bool) -> None:
        """Prepare the backward of a micro-batch, except in a pipeline. ``last`` tells whether it ends the step."""

    def start_reducing(self, module: nn.Module) -> None:
        """Start to reduce the gradients of a stage with a split backward, after its last micro-batch.

        ``module`` is the stage after all axes have wrapped it.
        """

    def finish_gradients(self, names: Mapping[nn.Parameter, Sequence[str]]) -> None:
        """Complete the gradients after the last backward. ``names`` maps each of the rank's parameters to its names."""

    def end_step(self, stages: Iterable[nn.Module], training: bool) -> None:
        """End a step of training or evaluation. Called also if an error ended the step."""


class AxisOfStage(Axis):
    """An axis of this project whose ranks divide a stage: its work (``Layout.OF_STAGE``), or its experts.

    Attributes:
        degree: The key of the number of ranks.
        divides: What the ranks divide, for error messages.
    """

    degree: ClassVar[str]
    divides: ClassVar[str]

    @classmethod
    def check_keys(cls, section: Any, info: StrategyInfo) -> None:
        """See ``Axis.check_keys``."""
        name, ranks = section.name, getattr(section, cls.degree)
        if not info.tensor and ranks != 1:
            own, *_ = names_where(degree=cls.degree)
            raise PlanError(
                f"parallel={name} leaves {cls.divides} whole, and parallel.{cls.degree}={ranks} cuts them; use "
                f"parallel={own}, or with replicas or stages parallel={', '.join(names_where(tensor=True, degree=''))}"
            )
        if info.degree == cls.degree and ranks == 1:
            raise PlanError(
                f"parallel={name} cuts {cls.divides} among processes, and parallel.{cls.degree}=1 is one; set "
                f"parallel.{cls.degree}=2"
            )

    @classmethod
    def allows(cls, info: StrategyInfo, layout: Layout) -> bool:
        """See ``Axis.allows``."""
        return info.tensor if getattr(layout, cls.degree) > 1 else info.degree != cls.degree


def all_reduce_sum(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """All-reduce gradients in place, with one collective per dtype."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat, group=group)
        copy_back(flat, alike)


def copy_back(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    """Copy the parts of a flat tensor into the gradients that were concatenated in it."""
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
