"""The base class of all strategies: a rank's part of the model, and a step that all ranks take together.

Subclasses define how a batch passes through the stages: ``LocalStrategy`` through one stage, ``parallel.pipeline``
through the stages of several ranks, ``parallel.several_devices`` through the stages of several devices in one process.
``Strategy`` does everything else: it scales the loss, sums the gradients of tied parameters, agrees on the step's
numbers among ranks, and clips.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from pkgutil import resolve_name

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import add_note
from data.dataset import Batch
from models.chain import LOSS, Chain, is_within
from models.losses import Several, means
from models.step import current_step, set_step
from parallel.auxiliary import AuxiliaryLosses
from parallel.axes import axes_of
from parallel.batchnorm import RunningStatistics
from parallel.devices import autocast, between_layers, local_device, outside_autocast, parameter_dtype
from parallel.dtensor import local
from parallel.gathering import gathering
from parallel.gradients import Gradients, sum_dtype
from parallel.mesh import REPLICAS, Mesh
from parallel.outputs import Taker, hand_out
from parallel.pieces import Boxes, Piece, fill, piece_of
from parallel.placement import Placement
from parallel.plan import Plan
from parallel.stage import RAISED_IN, Stage
from parallel.step_result import LossScale, StepResult
from parallel.strategies import strategy_info
from parallel.timeline import BACKWARD, FORWARD, Timeline


@dataclass(frozen=True)
class Options:
    """Options for running stages in any layout.

    Attributes:
        seed: The run's seed, for initial weights and dropout.
        timeout_s: The longest time that a rank waits for another, in seconds.
        compile: Whether layers are compiled.
    """

    seed: int
    timeout_s: float = 300.0
    compile: bool = False


class Strategy(ABC):
    """A rank's part in training a chain according to a plan. Every rank of the mesh constructs one strategy.

    Attributes:
        chain: The whole model.
        stages: The stages that this rank runs, in order.
        indices: The indices of ``stages`` among all stages.
        device: The device of the batches and of the first stage.
        devices: All devices on which this rank computes, each once.
        timeline: When this rank worked in the newest steps of a pipeline; None without a pipeline.
        loss_scale: The loss scaling, which is enabled for float16.
        axes: The axes along which there are several ranks, in the order of ``AXES``.
        modules: The modules that are called in place of ``stages``, after the axes have wrapped them.
        computing: The pass that this rank computes now (FORWARD or BACKWARD) and the index of its replica's
            micro-batch, for error messages. None between passes.
    """

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        mesh: Mesh,
        devices: Sequence[torch.device],
        options: Options,
        sample: Batch | None = None,
    ) -> None:
        """Build this rank's stages and place them on its ``devices`` in turn. ``mesh`` must be connected.

        ``sample`` is one micro-batch, for its shapes. It may be None if there is no pipeline.
        """
        set_step(1)
        self.plan, self.chain, self.mesh, self.options = plan, chain, mesh, options
        self.device, self.devices = devices[0], list(dict.fromkeys(devices))
        self.timeline: Timeline | None = None
        self.computing: tuple[str, int] | None = None
        self.loss_scale = LossScale(enabled=plan.precision == "fp16")
        self._dtype, self._replica, self._alone = parameter_dtype(plan.precision), mesh.replica, mesh.size == 1
        self._first = 0  # the index of the first sample: in the global batch, or in the split in an evaluation
        self._averaged = plan.dp if self.loss_scale.enabled else 1  # a loss is divided by its terms and by this
        each = max(1, sample.terms) / len(sample) if sample is not None else 1.0
        self._usual_terms = self._terms = plan.global_batch_size // plan.dp * each
        along = axes_of(plan)
        self.axes = [axis(name, plan, chain, mesh) for name, axis in along]
        divides = {*REPLICAS, *(name for name, axis in along if axis.divides_batch)}
        self._counts_terms = mesh.owns(divides)
        # One context spans a whole step, so that weights are cast once per step and not once per micro-batch. The
        # gradient of a kept cast is computed last, perhaps after FSDP has reduced the sharded gradients of its layer.
        keep_casts = plan.shards == 1 or plan.pipelined
        self._autocast = autocast(plan.precision, self.device.type, keep_casts)
        planned = plan.stages_of(mesh.position)
        self.indices = [stage.index for stage in planned]
        self.stages = [
            Stage(
                chain,
                stage.layers,
                seed=options.seed,
                device=devices[i % len(devices)],
                dtype=self._dtype,
                between_layers=between_layers(plan.precision),
                recompute=plan.recompute,
                # Only there does a layer's input have to stay as it is.
                facts=plan.facts if plan.recompute or options.compile or plan.shards > 1 else None,
                sample_dims=plan.sample_dims,
                axes=self.axes,
            )
            for i, stage in enumerate(planned)
        ]
        self.modules = [self._wrapped(stage) for stage in self.stages]
        if options.compile:
            for stage in self.stages:
                names = {*stage.layers.names, *[LOSS] * stage.ends_chain}
                packed = sample is not None and sample.documents is not None  # layers read them beside their inputs
                stage.compile(random=packed or not names.isdisjoint(plan.facts["random"]))
        self.gradients = Gradients(plan, self.stages, mesh, options.timeout_s, self.placement, self.axes)
        self.statistics = RunningStatistics(self.stages, plan.chunks, mesh.dp_group, plan.sync_batchnorm)
        self._changed = [  # the owner and the name of each tensor that forwards change
            (stage.layers.get_submodule(owner), name)
            for stage in self.stages
            for owner, _, name in (tensor.rpartition(".") for tensor in plan.facts["changes"])
            if is_within(f"{owner}.", stage.layers.names)
        ]
        self.auxiliary = AuxiliaryLosses(plan, self.stages, mesh, self.device, divides)

    # -- the step --------------------------------------------------------------------------------------------------

    def train_step(self, batch: Batch, step: int, stop: bool = False, loss_limit: float = math.inf) -> StepResult:
        """Compute forward and backward of this replica's batch, in ``plan.chunks`` micro-batches.

        On return, gradients are averaged over replicas, summed over tied parameters, and unscaled. If the result is not
        ``usable``, the state that forwards change, such as BatchNorm's running statistics, is as before.

        Args:
            batch: This replica's equal part of the global batch, on any device.
            step: The number of the step, from 1. Dropout depends on it.
            stop: Whether this rank asks to end the run. The result tells whether any rank asks.
            loss_limit: The limit above which the loss is a spike, the same on every rank.

        Returns:
            The numbers over the global batch.
        """
        self.gradients.clear()
        self.statistics.begin()
        changed = [(*where, tensor := getattr(*where), tensor.detach().clone()) for where in self._changed]
        # The gradient of the global mean loss, over ``count`` targets that are not padding, is computed in this order:
        #     sum over a replica's targets  x  loss scale / (averaged x terms)   here, as the loss's factor
        #     mean over the dp replicas                                          by DistributedDataParallel or FSDP2
        #     x  averaged / loss scale  x  (dp x terms) / count                  in _agree, when count is known
        # ``terms`` is about the number of a replica's targets, padding included, and the same on all replicas.
        # ``averaged`` is 1; in float16 it is dp, so that every number is as large as in one process.
        placed, factor = self._placed(batch), self.loss_scale.factor / (self._averaged * self._terms)
        before = current_step()
        set_step(step)
        if isinstance(loss := self.chain.loss, Several):
            loss.totals = loss.counts(placed.targets) * self._counts_terms
            if not self._alone:
                dist.all_reduce(loss.totals)
        with self.auxiliary.step(factor):
            if self.auxiliary.in_advance:
                with self._step(step, gradients=False):
                    self.forward(placed)
                    self.auxiliary.close()
                self.take_sums()
                self.statistics.begin()
                _put_back(changed)
            with self._step(step, factor):
                self.forward_backward(placed)
        self.gradients.finish()
        self.statistics.take()
        result = self._agree(placed.terms, stop, loss_limit)
        if result.usable:
            self.statistics.update()
            self.auxiliary.after_step()
        else:
            set_step(before)
            _put_back(changed)
        return result

    def eval_step(self, batch: Batch, number: int = 1, taker: Taker | None = None) -> Tensor:
        """Evaluate this replica's batch, without gradients.

        Args:
            batch: This replica's equal part of the global batch, on any device.
            number: The number of the global batch in the split, from 1. Random numbers depend on it.
            taker: Gets the output of the last layer for the global batch, on rank 0. All ranks give one, or none does.

        Returns:
            [loss sum, count, metric sums...] in ``sum_dtype``; zeros if this rank does not compute the loss. Add up the
            vectors of all batches and pass the sum to ``all_sum``.
        """
        self._first = (number - 1) * self.plan.global_batch_size
        placed = self._placed(batch)
        for stage in self.stages:
            stage.taker = taker
        with self._step():
            self.forward(placed)
        if taker is not None:
            mine = [x for stage in self.stages for x in stage.take_outputs(self.device)]
            for axis in reversed(self.axes):
                mine = [axis.whole_output(x) for x in mine]
            several = len(placed.targets) if isinstance(placed.targets, tuple) else None
            hand_out(mine, self.plan, self.mesh, self.device, taker, several)
        self._first = 0
        return self.take_sums()

    @abstractmethod
    def forward_backward(self, batch: Batch) -> None:
        """Pass the micro-batches of a training step forward and backward through the stages.

        ``batch`` is on this rank's device, and its floating-point tensors have the dtype of the parameters.
        """

    @abstractmethod
    def forward(self, batch: Batch) -> None:
        """Pass the micro-batches of an evaluation step forward through the stages. See ``forward_backward``."""

    @contextmanager
    def _step(self, step: int | None = None, loss_scale: float = 1.0, gradients: bool = True) -> Iterator[None]:
        """Prepare the stages for a step, and end the step after the block. ``step`` is None in an evaluation.

        ``gradients`` is whether a pass of training has a backward.
        """
        training = step is not None
        gradients &= training
        for stage in self.stages:
            stage.begin(training, step or 0, loss_scale)
        try:
            gathers = gathering(self.plan, self.mesh.axis(*REPLICAS), self.options.compile)
            with torch.set_grad_enabled(gradients), self._autocast, gathers, ExitStack() as of_axes:
                for axis in self.axes:
                    of_axes.enter_context(axis.step())
                yield
        except Exception as error:
            self._add_location(error, step)
            raise
        finally:
            self.computing = None
            for stage in self.stages:
                stage.end()
            for axis in self.axes:
                axis.end_step(self.modules, gradients)

    def _add_location(self, error: Exception, step: int | None) -> None:
        """Add a note to an error that tells at which point of the step it was raised."""
        words = [f"step {step}" if step else "evaluation"]
        if self.computing is not None:
            direction, index = self.computing
            layers = [name for stage in self.stages for name in stage.layers.names]
            layer = vars(error).get(RAISED_IN, f"layers {layers[0]} … {layers[-1]}")
            number = self._replica * self.plan.chunks + index  # among those of all replicas
            size = self.plan.microbatch_size
            words.insert(0, f"the {direction} of {layer}, micro-batch {number} with {size} samples")
        if not self._alone:
            words.append(f"rank {self.mesh.rank}")
        add_note(error, f"raised in {', '.join(words)}")

    def _placed(self, batch: Batch) -> Batch:
        def placed(tensor: Tensor) -> Tensor:
            tensor = tensor.to(self.device, non_blocking=True)
            return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

        weights = None if batch.weights is None else batch.weights.to(self._dtype)  # a stage counts them on the host
        return self.part_of(replace(batch.map(placed), weights=weights))

    def part_of(self, batch: Batch) -> Batch:
        """Return this rank's part of the batch of its replica."""
        return reduce(lambda part, axis: axis.part_of_batch(part), self.axes, batch)

    def _agree(self, targets: int, stop: bool, loss_limit: float) -> StepResult:
        """Agree on the step's numbers by one small all-reduce: loss, count, metrics, squared norm and the stop flag.

        A number that is not finite on one rank makes the sum not finite on all ranks, so all ranks make the same
        decision.
        """
        loss, count, *metrics = self.take_sums()
        if not self._counts_terms or not any(stage.ends_chain for stage in self.stages):
            targets = 0  # other ranks count them
        squares = self.gradients.squared_norm().to(loss)
        losses = [self.auxiliary.value[0]] if self.auxiliary.exist else []
        mine = [loss, count, loss.new_full((), targets), squares, loss.new_full((), stop), *losses, *metrics]
        loss, count, targets_of_all, squares, stops, *metrics = self.all_sum(torch.stack(mine))
        auxiliary = metrics.pop(0) if losses else 0.0
        factor = self.plan.dp * self._terms / count if count else 1.0
        if targets_of_all:  # by a power of two, so that no bit of a result depends on the steps before
            more = targets_of_all / self.plan.dp / self._usual_terms
            self._terms = self._usual_terms * 2.0 ** round(math.log2(more))
        factor *= self._averaged / self.loss_scale.factor
        self.gradients.multiply(factor)
        norm = math.sqrt(squares) * factor if math.isfinite(squares) else math.nan
        named = dict.fromkeys(("loss", *self.chain.loss.metrics), math.nan)
        named |= means(self.chain.loss, (loss, count, *metrics))
        mean = named.pop("loss") + auxiliary
        if self.auxiliary.exist:
            named["auxiliary_loss"] = auxiliary
        return StepResult(mean, norm, stops > 0, count, spike=mean > loss_limit, metrics=named)

    def all_sum(self, vector: Tensor) -> list[float]:
        """Add up a vector over all ranks. All ranks call this together and get the same result."""
        if not self._alone:
            dist.all_reduce(vector)
        return vector.tolist()

    def sum_of(self, *numbers: float) -> list[float]:
        """Add up each of several numbers over all ranks. All ranks call this together."""
        vector = torch.tensor(numbers, dtype=sum_dtype(self.device))
        return self.all_sum(vector if self._alone else vector.to(self.device))

    def norm(self, of: Callable[[nn.Parameter], Tensor | None]) -> float:
        """Compute a norm over the whole model, over all stages and shards, with tied parameters counted once.

        All ranks call this together and get the same number. ``of`` returns, for each parameter, a tensor that is
        divided among ranks like the parameter (the parameter, its gradient, or an optimizer state), or None.
        """
        return math.sqrt(self.all_sum(self.gradients.squared_norm(of)[None])[0])

    def grad_norm(self) -> float:
        """Compute the current norm of the whole model's gradients. All ranks call this together."""
        return self.norm(lambda parameter: parameter.grad)

    def clip_grad_norm_(self, max_norm: float, norm: float) -> None:
        """Scale gradients of norm ``norm`` down to at most ``max_norm``, as ``nn.utils.clip_grad_norm_`` does."""
        self.gradients.multiply(min(1.0, max_norm / (norm + 1e-6)))

    def clip_grad_value_(self, limit: float) -> None:
        """Clamp every gradient element to [-limit, limit]."""
        self.gradients.clamp(limit)

    def close(self) -> None:
        """Drop the references to process groups. Called before the groups are destroyed."""
        self.stages.clear()
        self.modules.clear()
        self.axes.clear()

    # -- this rank's part of the model, under the names of the whole model -------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over every parameter that this rank updates, including copies of tied parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """List (global name, parameter) of what this rank updates.

        A copy of a tied parameter has its canonical name.
        """
        return [named for stage in self.stages for named in self._named_parameters(stage)]

    def _named_parameters(self, stage: Stage) -> list[tuple[str, nn.Parameter]]:
        return [(self.chain.canonical(name), parameter) for name, parameter in stage.layers.named_parameters()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers of this rank's stages under global names; of a sharded tensor, its box.

        A tied parameter is included only under its canonical name, so the ranks of one replica together return each
        tensor of the model once.
        """
        return {
            name: tensor
            for stage in self.stages
            for name, tensor in stage.layers.state_dict().items()
            if name not in self.chain.tied
        }

    def load_state_dict(self, state: Mapping[str, Boxes], wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Copy this rank's part out of ``state``.

        Args:
            state: Any part of the model that includes this rank's, under global names.
            wanted: Returns whether to copy the tensor with this global name. The other tensors do not change.

        Raises:
            KeyError: If a tensor is missing; the argument is its name.
            ValueError: If a tensor has another shape or holds another kind of number. The message names the tensor.
        """
        for stage in self.stages:
            for name, tensor in stage.layers.state_dict().items():
                canonical = self.chain.canonical(name)
                if wanted(canonical):
                    fill(self.piece(canonical, tensor), state[canonical], canonical)

    def placement(self, name: str, tensor: Tensor) -> Placement:
        """Return the division of a parameter, its gradient, or a buffer over the mesh.

        ``name`` is the canonical name of the parameter or buffer.
        """
        return Placement.of(tensor.shape, [axis.split(name, tensor) for axis in reversed(self.axes)])

    def piece(self, name: str, tensor: Tensor) -> Piece:
        """Return this rank's piece of a tensor. See ``placement`` for the arguments."""
        return piece_of(tensor, self.placement(name, tensor), self.mesh)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor (see ``placement``). All ranks that have parts of it call this together.

        ``full_tensor`` is not used, because DTensor keeps the process groups of an earlier run in the same process.
        """
        return self.placement(name, tensor).whole(local(tensor), self.mesh)

    # -- for subclasses --------------------------------------------------------------------------------------------

    def _wrapped(self, stage: Stage) -> nn.Module:
        module: nn.Module = stage
        asked = [(p, axis.averaged_over(name)) for name, p in self._named_parameters(stage) for axis in self.axes]
        apart = {parameter: over for parameter, over in asked if over is not None}
        for axis in reversed(self.axes):
            module = axis.wrap(module, apart)
        return module

    def samples_of(self, batch: Batch) -> Tensor:
        """Return [chunks, 2]: the index of each micro-batch's first sample in the global batch, and its size."""
        chunks = self.plan.chunks
        count = len(batch) // chunks
        first = (torch.arange(chunks) + self._replica * chunks) * count + self._first
        return torch.stack((first, torch.full_like(first, count)), dim=1)

    def take_sums(self) -> Tensor:
        """Return the stages' [loss sum, count, metric sums...] since the last call; zeros if other ranks count them."""
        total = torch.zeros(2 + len(self.chain.loss.metrics), dtype=sum_dtype(self.device), device=self.device)
        for stage in self.stages:
            if (sums := stage.take_sums()) is not None and self._counts_terms:
                total += sums.to(self.device)
        return total


def _put_back(changed: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> None:
    """Give modules their tensors (owner, name, tensor, its numbers) again, of which a forward may have set others."""
    for owner, name, tensor, numbers in changed:
        tensor.data.copy_(numbers)
        setattr(owner, name, tensor)


class LocalStrategy(Strategy):
    """One stage, with or without replicas: ``single``, ``ddp``, ``fsdp``, ``hsdp`` and ``tensor``."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._model: nn.Module = self.wrap()
        self._no_sync = getattr(self._model, "no_sync", nullcontext)
        self._backward = outside_autocast(self.device.type)

    def wrap(self) -> nn.Module:
        """Return this rank's stages as one module with the call signature of a ``Stage``."""
        return self.modules[0]

    def forward_backward(self, batch: Batch) -> None:
        """See ``Strategy.forward_backward``. Replicas average their gradients in the last micro-batch's backward."""
        chunks = batch.chunks(self.plan.chunks)
        for i, (samples, chunk) in enumerate(zip(self.samples_of(batch).tolist(), chunks, strict=True)):
            self.computing = FORWARD, i
            last = chunk is chunks[-1]
            for axis in self.axes:
                axis.before_backward(self.modules, last)
            with nullcontext() if last else self._no_sync():
                loss = self._model(*chunk.input_tensors, samples=samples, **chunk.others)
                for stage in self.stages:
                    self.statistics.add(stage)
                if self.auxiliary.exist:
                    self.auxiliary.close()
                self.computing = BACKWARD, i
                with self._backward:
                    loss.backward()

    def forward(self, batch: Batch) -> None:
        """See ``Strategy.forward``."""
        chunks = batch.chunks(self.plan.chunks)
        for i, (samples, chunk) in enumerate(zip(self.samples_of(batch).tolist(), chunks, strict=True)):
            self.computing = FORWARD, i
            self._model(*chunk.input_tensors, samples=samples, **chunk.others)

    def close(self) -> None:
        """See ``Strategy.close``."""
        del self._model, self._no_sync
        super().close()


def build_strategy(
    plan: Plan, chain: Chain, mesh: Mesh, options: Options, sample: Batch | None, local_rank: int = 0
) -> Strategy:
    """Build this rank's strategy. The registry has the name of its class.

    The arguments are those of ``Strategy``. ``local_rank`` is this rank's number on its machine, which selects its
    device.
    """
    devices = [*map(torch.device, plan.devices)] or [local_device(plan.device_type, local_rank)]
    strategy_class = resolve_name(strategy_info(plan.strategy).class_path)
    return strategy_class(plan, chain, mesh, devices, options, sample)
