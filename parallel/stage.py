"""A stage: consecutive layers that one rank runs together, from the input tensors to the output tensors or the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from inspect import unwrap
from operator import itemgetter
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.random import fork_rng
from torch.utils.checkpoint import checkpoint

from common.errors import ModelError
from data.dataset import mapped
from models import auxiliary, step
from models.chain import LOSS, Chain, Tensors, as_tuple, converted
from models.losses import Sums, is_by_sample, loss_of, replicas
from models.seeds import BySample, Samples, computing, derive_seed, forget, seed_generators
from parallel.axes import Axis, Shards
from parallel.examination import some_samples
from parallel.outputs import Taker

# The attribute of an error with a description of the layer that raised it.
RAISED_IN = "raised_in_layer"

T = TypeVar("T")
Where = tuple[int, int, Tensor | None]  # the first sample, the number of samples, and their documents


class Stage(nn.Module):
    """Some consecutive layers of a chain with their weights. Parameters have the same names as in the whole model.

    A strategy calls ``begin`` before each step's micro-batches and ``end`` after them.

    Attributes:
        layers: The layers, by their names.
        begins_chain, ends_chain: Whether the stage contains the first or the last layer of the chain.
        sums: [loss, count, *metrics] float64 of each micro-batch since the last ``take_sums``, at the chain's end.
        layer_hook: A function that all stages of this process call in place of each layer and of the loss, or None.
            ``layer_hook(stage, name, where, layer, *tensors)`` returns the result of ``layer(*tensors)``; ``where`` is
            the first sample and the number of samples, or None if nothing is random.
        sample_dims: The dimensions of samples of each tensor that the loss gets from the model. If they are unknown, a
            stage that is the whole chain removes samples without weight from its inputs.
        taker: Gets what the last layer returns in an evaluation (see ``parallel.outputs``); None if nobody asks.
        taken: What the taker has selected of each micro-batch, and the targets, with the index of its first sample.
    """

    layer_hook: ClassVar[Callable | None] = None

    def __init__(
        self,
        chain: Chain,
        names: Sequence[str],
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        between_layers: torch.dtype | None = None,
        recompute: bool = False,
        facts: Mapping[str, Sequence[str]] | None = None,
        sample_dims: Sequence[Sequence[int]] = (),
        axes: Sequence[Axis] = (),
    ) -> None:
        """Build the layers ``names`` with their initial weights.

        Floating-point tensors that a layer passes to the next layer are converted to ``between_layers`` if it is given.
        With ``recompute`` a layer's activations are recomputed in the backward instead of kept. The layers of
        ``facts["writes"]`` change their inputs in place, and may get copies of the inputs. The layers of
        ``facts["fills"]`` are recomputed to their end. Each of ``axes`` reduces the layers to this rank's part.
        """
        super().__init__()
        self.chain, self.device, self.seed, self.recompute = chain, device, seed, recompute
        self._writing, self._filling = (facts["writes"], facts["fills"]) if facts is not None else ((), ())
        self._between_layers = between_layers
        tied_in_stage = chain.tied_within(names)

        def built(name: str, layer: nn.Module) -> None:
            if name in self._writing:  # before the axes: inside of FSDP2 the copy must be made
                layer.register_forward_pre_hook(lambda _, given: self._copied(given))
                if (loss := loss_of(layer)) is not None:
                    layer.loss = lambda *given: loss(*self._copied(given))  # pyright: ignore[reportArgumentType]
            for axis in reversed(axes):
                axis.prepare(name, layer, tied_in_stage)

        self.layers = chain.build(names, seed, device, dtype, built)
        # The shards of a parameter are contiguous; the shards of tied parameters are made later.
        if chain.channels_last and not any(isinstance(axis, Shards) for axis in axes):
            # A convolution's output has the memory format of its weight.
            self.layers.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # no overload has it
        first, self._last = chain.names[0], chain.names[-1]
        self.begins_chain, self.ends_chain = names[0] == first, names[-1] == self._last
        self.sample_dims = sample_dims
        last = self.layers.get_submodule(self.layers.names[-1])
        loss = chain.loss if loss_of(last) is None else getattr(type(last), "loss", None)
        self._loss_apart = loss_of(last) is None
        self.leaves_out = not self.ends_chain or is_by_sample(loss)
        self.step = 0
        self.loss_scale = 1.0
        self.sums: list[Tensor] = []
        self.taker: Taker | None = None
        self.taken: list[tuple[int, tuple[Tensor, ...]]] = []
        self._compiled_whole = False
        self._modes: list[tuple[nn.Module, bool]] = []  # the modes before an evaluation, restored at its end

    def begin(self, training: bool, step: int = 0, loss_scale: float = 1.0) -> None:
        """Start step number ``step``, counted from 1. Dropout depends on this number. No weight changes until ``end``.

        In training, modules that were built or put in eval mode stay in eval mode.
        """
        if not training:
            self._modes = [(module, module.training) for module in self.modules()]
            self.eval()
        self.step, self.loss_scale = step, loss_scale
        self._set_step_cache(dict)

    def end(self) -> None:
        """End a step, after its forwards and backwards. Weights may change now."""
        forget()
        self._set_step_cache(lambda: None)
        self.taker = None
        if self._modes:
            self.train()
            for module, mode in self._modes:
                module.training = mode
            self._modes.clear()

    def _set_step_cache(self, cache: Callable[[], dict | None]) -> None:
        for module in self.layers.get_submodule(self.layers.names[-1]).modules():
            if hasattr(module, "step_cache"):  # a head, and its reference
                module.step_cache = cache()  # pyright: ignore[reportArgumentType]  # its stub knows tensors only

    def forward(
        self,
        *tensors: Tensor,
        samples: Sequence[int] | Tensor,
        targets: Tensors | None = None,
        documents: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensors:
        """Compute one micro-batch. Samples of weight 0, which fill up the last batch of an evaluation, do not count.

        Args:
            *tensors: [b, ...] each: the batch's inputs, or the output of the previous stage.
            samples: The index of the micro-batch's first sample in the global batch, and the number of its samples.
                Random numbers depend on them. A torch schedule cuts them out of a tensor and gives [1, 2] int64 on the
                CPU.
            targets: [b, ...], or a tuple of such tensors; used by the stage that ends the chain, ignored by the others.
            documents: The documents of the samples (``Batch.documents``).
            weights: [b], used like ``targets``: 1, or 0 for the last samples. Best on the CPU, where they are counted.

        Returns:
            The next stage's input. The stage that ends the chain returns the scalar to differentiate, which is the
            summed loss times ``loss_scale``, or, without targets, the model's output.
        """
        first, count = samples.flatten().tolist() if isinstance(samples, Tensor) else samples
        tensors = tuple(map(self._as_received, tensors))
        counted = count if weights is None else int(weights.count_nonzero())
        replicas.filled = None if counted == count else (counted, count)
        if not self.ends_chain:
            targets = weights = None
        elif targets is not None and weights is not None:
            weights = weights.to(as_tuple(targets)[0].device, non_blocking=True)
            if 0 < counted < count and not self.leaves_out:
                targets = mapped(lambda x: x[:counted], targets)
                if not self.sample_dims and self.begins_chain:
                    tensors, weights, count = tuple(x[:counted] for x in tensors), weights[:counted], counted
                    documents, replicas.filled = None if documents is None else documents[:counted], None
        # If nothing is random, ``where`` is None, so that the stage is compiled once for all micro-batches.
        where = None if self._compiled_whole else (first, count, documents)
        kept = nullcontext() if self.training else fork_rng([self.device] * (self.device.type == "cuda"))
        with kept:  # what an evaluation draws changes nothing after it
            result, returned = self._compute(where, tensors, targets, weights)
            if self.taker is not None and targets is not None:
                of_these = mapped(lambda x: x[:counted], targets)
                selected = self.taker.select(self._rows(returned, counted, count), of_these)
                self.taken.append((first, (*selected, *as_tuple(of_these))))
        if not isinstance(result, Sums):
            return self._as_output(result)
        if counted:
            self.sums.append(result.stack())
        return result.loss * self.loss_scale

    def _compute(
        self, where: Where | None, tensors: tuple[Tensor, ...], targets: Any, weights: Tensor | None
    ) -> tuple[Tensors | Sums, tuple[Tensor, ...]]:
        """Compute all layers and, if there are targets, the loss. ``where`` is None if nothing is random.

        Returns:
            The output or the loss; and for a taker a copy of the last layer's output, which the loss may change.
        """
        layers = [(name, self.layers.get_submodule(name)) for name in self.layers.names]
        last_name, last = layers[-1]
        head_loss = None if targets is None else loss_of(last)
        tensors = tuple(map(self._in_order, tensors))
        output: Tensors = tensors
        for name, layer in layers if head_loss is None else layers[:-1]:
            compute: Callable[..., Any] = self.compute_layer
            if self.recompute and torch.is_grad_enabled():
                # The layer is seeded again in the recomputation, so there is no random state to preserve.
                how = {"use_reentrant": False, "preserve_rng_state": False, "early_stop": name not in self._filling}
                compute = partial(checkpoint, self.compute_layer, **how)
            output = compute(name, layer, where, *tensors)
            if name != self._last:
                output = converted(output, self._between_layers)
            tensors = tuple(map(self._in_order, output if isinstance(output, tuple) else (output,)))
        returned = ()
        if targets is None:
            return output, returned
        if self.taker is not None:
            returned = output if head_loss is None else self.compute_layer(last_name, last, where, *tensors)
            if self.taker.alone:
                return torch.zeros((), device=tensors[0].device), as_tuple(returned)
            returned = tuple(x.clone() for x in as_tuple(returned))
        if weights is not None and len(weights) > (rows := len(as_tuple(targets)[0])):
            dims = self.sample_dims or [[0]] * len(tensors)
            tensors = some_samples(tensors, dims, 0, rows, len(weights))
            weights, output = weights[:rows], tensors if isinstance(output, tuple) else tensors[0]
            replicas.filled = None
        if head_loss is not None:
            return self.compute_layer(last_name, head_loss, where, *tensors, targets, weights), returned
        if LOSS in self._writing:
            copies = self._copied(tensors)
            output = copies if isinstance(output, tuple) else copies[0]
        return self.compute_layer(LOSS, self.chain.loss, where, output, targets, weights), returned

    def _rows(self, returned: tuple[Tensor, ...], counted: int, count: int) -> tuple[Tensor, ...]:
        """Return the first ``counted`` samples of ``count``, in dimension 0; tensors without samples are left out."""
        dims = self.sample_dims if self.sample_dims and self._loss_apart else [[0] if x.dim() else [] for x in returned]
        rows = some_samples(returned, dims, 0, counted, count)
        return tuple(x.movedim(of[0], 0) for x, of in zip(rows, dims, strict=True) if of)

    def _copied(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a layer's inputs in a form that the layer may change in place: inputs that must not change are copied.

        A recomputation starts from the inputs. The inputs of a sharded layer, and some outputs, are views with hooks.
        torch does not let a layer change these views, or the change would lose the hooks.
        """
        if not torch.is_grad_enabled():
            return tensors
        return tuple(t if t is None or not (self.recompute or t._is_view()) else t.clone() for t in tensors)

    def as_sent(self, x: Tensor) -> Tensor:
        """Return ``x`` in the form in which it is sent to the next stage, which is contiguous.

        Images in channels_last, [b, c, h, w], are sent as [b, h, w, c], which is their order in memory. So neither the
        images nor their gradients are copied into another order on either side.
        """
        x = (x.permute(0, 2, 3, 1) if self._is_image(x) else x).contiguous()
        # If the backward is split, torch detaches the sent tensors in place. A view cannot be detached. A parameter
        # that a layer passes on must not be detached, and has no node from which a split backward could start.
        return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() or isinstance(x, nn.Parameter) else x

    def _as_output(self, output: Tensors) -> Tensors:
        change = torch.Tensor.contiguous if self.ends_chain else self.as_sent
        return tuple(map(change, output)) if isinstance(output, tuple) else change(output)

    def _as_received(self, x: Tensor) -> Tensor:
        # A layer never gets ``x`` itself. Autocast treats a leaf that has a gradient as a weight, and would keep the
        # cast of ``x`` until the end of the step. torch would detach ``x`` if it is passed on unchanged. A first layer
        # that works in place (``ReLU(inplace=True)``) can change neither a leaf nor a view of a leaf. The inputs of
        # micro-batches are views of one batch: autograd would treat a change of one micro-batch as a change of all.
        x = torch.ops.aten._unsafe_view(x, x.shape)
        return x if self.begins_chain or not self._is_image(x) else x.permute(0, 3, 1, 2)

    def _in_order(self, x: Tensor) -> Tensor:
        """Return ``x`` in the memory order in which a stage receives it, so that results do not depend on the cuts.

        The random numbers that a layer draws by itself, and the order of its output, follow the order of its input.
        """
        if self._is_image(x):
            return _dense(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return _dense(x)

    def _is_image(self, x: Tensor) -> bool:
        return self.chain.channels_last and x.dim() == 4

    def compute_layer(
        self, name: str, layer: Callable[..., T], where: Where | None, given: Tensors, *more: Tensors | None
    ) -> T:
        """Compute a layer, or the loss, with its random numbers and documents.

        An error raised here gets the layer's name and type in its attribute ``RAISED_IN``. Raises ModelError for
        ``torch.func.grad`` and the like in a recomputed layer.
        """
        call = layer if Stage.layer_hook is None else partial(Stage.layer_hook, self, name, where and where[:2], layer)
        try:
            if where is None:
                return call(given, *more)
            first, count, documents = where  # step 0 is an evaluation
            # Random numbers that the layer draws by itself depend on the micro-batch; the layer's dropout depends on
            # the sample.
            seed = derive_seed(self.seed, self.step, first, name)
            # The generator of the inputs' device is used: ``data_parallel`` runs copies of the stage on other devices.
            seed_generators((given[0] if isinstance(given, tuple) else given).device, seed)
            with computing(Samples(count, first, self.seed, self.step, documents=documents), seed):
                return call(given, *more)
        except Exception as error:
            kind = type(getattr(layer, "__self__", layer)).__name__
            at = f"layer {name!r} ({kind})" if name != LOSS else f"the loss ({kind})"
            if self.recompute and "saved tensor hooks" in str(error):
                raise ModelError(
                    f"{at}: torch.func cannot differentiate inside of a layer that is recomputed; set "
                    "train.activation_checkpointing=false"
                ) from error
            vars(error)[RAISED_IN] = at
            raise

    def compile(self, random: bool) -> None:
        """Compile layers and loss in place, so that names do not change.

        Seeding, which comes before a layer draws random numbers, cannot be compiled. With ``random`` each layer is
        therefore compiled separately; otherwise all layers are compiled together.
        """
        self._compiled_whole = not random and not self.recompute
        layers = self.layers.items()
        # All layers have the same code object. torch compiles 8 versions of it and then runs all other layers
        # uncompiled.
        # ResNet-50 has eight kinds of layers, each in training and in evaluation.
        import torch._dynamo.config as config
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        auxiliary.leave_uncompiled()
        step.leave_uncompiled()
        config.recompile_limit = max(config.recompile_limit, 4 * len(layers))
        # The operator of torch's encoder layers, compiled, fails under autocast on CPUs (torch 2.13).
        torch.backends.mha.set_fastpath_enabled(False)
        if self._compiled_whole:
            self._compute = torch.compile(self._compute)
            return
        # Dropout breaks a layer's graph. In a module that itself uses a checkpoint, torch would then compile the
        # forward but not the recomputation, so the whole module runs uncompiled (private; torch 2.13).
        skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(unwrap(checkpoint).__code__, skipped)
        for _, layer in layers:
            for module in layer.modules():
                if isinstance(module, BySample):  # it draws the same numbers for each sample as uncompiled
                    forward = torch.compiler.disable(module.forward)
                    module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]  # its stub: or a decorator
            layer.compile()
        last = layers[-1][1]
        if (loss := loss_of(last)) is not None:
            last.loss = torch.compile(loss)  # pyright: ignore[reportArgumentType]  # its stub knows tensors only

    def take_outputs(self, device: torch.device) -> list[Tensor]:
        """Return what the taker has selected since the last call, of all micro-batches in order, and the targets.

        Copies of the stage (``data_parallel``) leave them on their own devices.
        """
        parts = [selected for _, selected in sorted(self.taken, key=itemgetter(0))]
        self.taken.clear()
        return [torch.cat([x.to(device) for x in tensors]) for tensors in zip(*parts, strict=True)]

    def take_sums(self) -> Tensor | None:
        """Return the sums of all micro-batches since the last call, [2 + metrics] float64; None if there are none."""
        total = torch.stack([sums.to(self.device) for sums in self.sums]).sum(dim=0) if self.sums else None
        self.sums.clear()
        return total


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` contiguous, also in dimensions of size 1: torch reads their strides as a hint at channels_last."""
    x = x.contiguous()
    return x.view(x.shape) if 1 in x.shape else x
