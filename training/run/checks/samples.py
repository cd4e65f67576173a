"""Checks on a first batch, before any process starts: splits, dtypes, labels, and the values that the loss returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from common.errors import DataError, ModelError, PlanError, TrainingError, UserError, add_note
from data.dataset import ONE_TARGET, Batch, DataSet, InMemory, Source
from models.batchnorm import StepBatchNorm
from models.chain import Layers, Tensors, as_tuple, checked, converted
from models.losses import IGNORED, Sums, check_sums, copy_to_try, loss_of
from parallel.shape_inference import MOST_OUTPUTS, Accesses, Watch, reads_numbers

if TYPE_CHECKING:
    from training.run.setup import Setup

_aten = torch.ops.aten
# Operations whose arguments must all have one dtype; on the meta device they accept any.
_PRODUCTS = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution,
    _aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm,
}  # fmt: skip
_ERRORS = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, IndexError)
_STALE = (
    "its forward uses a parameter that is not an attribute of the module or of a module in it. A list, a dict, a "
    "functools.partial, a lambda or another object holds it, and keeps the first one when a run makes others, to build "
    "the layer and to divide it among ranks. Use self.weight, nn.ModuleList, nn.ModuleDict or nn.ParameterList"
)


def check_splits(setup: Setup) -> None:
    """Check the splits and the description that the data set's ``prepare()`` has set. Raises DataError."""
    data = setup.data
    for split in ("train", "valid", "test"):
        source = getattr(data, split, ...)
        if not isinstance(source, Source) and (split == "train" or source is not None):
            left = f"no {split}" if source is ... else f"{split}={str(source):.60}"
            raise DataError(
                f"{type(data).__name__}.prepare() left {left}; it must leave a data.dataset.Source, such as "
                "InMemory(inputs, targets), in train, valid and test (or None in the last two)"
            )
    if not isinstance(getattr(data, "description", None), str):
        raise DataError(f"{type(data).__name__}.prepare() left no description: one line that says what the data is")


def check_read(setup: Setup) -> None:
    """Check the result of reading one sample. Raises DataError."""
    source, first = setup.data.train, np.zeros(1, dtype=np.int64)
    given = source.read(first, 0)
    if isinstance(given, (tuple, list)) and len(given) == 2:
        inputs = given[0] if isinstance(given[0], tuple) else (given[0],)
        if inputs and all(
            isinstance(tensor, Tensor) and tensor.dim() > 0 and len(tensor) == 1 for tensor in (*inputs, given[1])
        ):
            again = Batch(*source.read(first, 0))
            if any(map(_differ, (*inputs, given[1]), (*again.input_tensors, again.targets))):
                raise DataError(
                    f"{type(source).__name__}.read() returned another sample for the same index the second time; it "
                    "must depend on its arguments only, so that a run can be repeated, resumed and divided. Draw from "
                    "a generator that is seeded by (epoch, index)"
                )
            return
        if isinstance(given[1], (tuple, list)):
            raise DataError(f"{type(source).__name__}.read() returned {len(given[1])} targets: {ONE_TARGET}")
    kinds = ", ".join(_kind(part) for part in given) if isinstance(given, (tuple, list)) else _kind(given)
    raise DataError(
        f"{type(source).__name__}.read() returned {kinds} for one index; it must return (inputs, targets): tensors "
        "with one row for each index, or a tuple of them as inputs"
    )


def _differ(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors differ in shape or in any bit, that of a NaN included."""
    bits, others = (t.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8) for t in (tensor, other))
    return tensor.shape != other.shape or not torch.equal(bits, others)


def _kind(given: Any) -> str:
    return f"a tensor {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"


class RealKinds(Watch):
    """Refuses errors that the meta device does not: integers in a product with weights, tokens beyond an embedding."""

    def __init__(self, meta: Batch, samples: Sequence[Batch]) -> None:
        """Note the range of each integer input."""
        super().__init__()
        columns = zip(*(batch.input_tensors for batch in samples), strict=True)
        self.refused = False
        self._range = {id(tensor): _range(column) for tensor, column in zip(meta.input_tensors, columns, strict=True)}

    def note(self, operator: Any, args: tuple, kwargs: dict) -> None:
        """Check an operation."""
        operation = operator.overloadpacket
        if operation in _PRODUCTS:
            dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor)}
            whole = [str(dtype).removeprefix("torch.") for dtype in dtypes if not dtype.is_floating_point]
            if whole and len(dtypes) > len(whole):
                self.refused = True
                raise TypeError(
                    f"it computes with floating-point numbers and gets {whole[0]}: give inputs.float(), or write the "
                    "file of data=arrays as float32"
                )
        elif operation is _aten.embedding and (limits := self._range.get(id(args[1]))) is not None:
            rows = len(args[0])
            if not 0 <= limits[0] <= limits[1] < rows:
                self.refused = True
                raise IndexError(f"it embeds 0 to {rows - 1} and gets whole numbers from {limits[0]} to {limits[1]}")


def known_samples(data: DataSet, sample: Batch) -> list[Batch]:
    """Return all samples of each split, training first, if they are tensors in memory; otherwise ``sample``."""
    splits = (data.train, data.valid, data.test)
    memories = [split for split in splits if isinstance(split, InMemory)]
    held = [split for split in memories if type(split).read is InMemory.read and len(split) > 0]
    return [Batch(split.inputs, split.targets) for split in held] if held and held[0] is data.train else [sample]


def _range(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    if any(tensor.is_floating_point() or tensor.dtype == torch.bool or tensor.numel() == 0 for tensor in tensors):
        return None
    return min(int(tensor.min()) for tensor in tensors), max(int(tensor.max()) for tensor in tensors)


def check_loss_value(loss: Any, sums: Any, trained: bool) -> None:
    """Check the result of a loss for a batch on the meta device.

    Raises:
        ModelError: The result is not ``Sums``.
        TrainingError: The result is not differentiable, so that no parameter can get a gradient.
    """
    check_sums(loss, sums)
    if trained and not sums.loss.requires_grad:
        raise TrainingError(
            f"the loss {type(loss).__name__} is not differentiable: leave out detach(), item(), argmax() and no_grad()"
        )


def check_labels(loss: Any, output: Tensors, size: int, targets: Tensor, whose: str) -> None:
    """Compute the loss of random outputs with real targets, the largest and the smallest among them.

    Args:
        loss: The loss.
        output: The model's output for a micro-batch, on the meta device.
        size: Samples of a micro-batch.
        targets: The known targets, [n, ...].
        whose: Whose targets these are, for the message.

    Raises:
        TrainingError: The loss cannot take the targets.
    """
    if sum(tensor.numel() for tensor in as_tuple(output)) > MOST_OUTPUTS:
        return
    whole = not targets.is_floating_point() and targets.numel() > 0
    if whole:
        each = targets.flatten(1) if targets.dim() > 1 else targets[:, None]
        counted = each != IGNORED
        if not counted.any():
            return
        low, high = each.masked_fill(~counted, int(each.max())).amin(1), each.amax(1)
        lowest, highest = int(low.min()), int(high.max())
        targets = targets[torch.stack([high.argmax(), low.argmin()]).repeat(size)[:size]]
    else:
        targets = targets[torch.arange(size) % len(targets)].float()  # as a step places them
    generator = torch.Generator().manual_seed(0)
    made_up = [torch.rand(t.shape, generator=generator).to(t.dtype) for t in as_tuple(output)]
    try:
        copy_to_try(loss)(tuple(made_up) if isinstance(output, tuple) else made_up[0], targets, None)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        span = f" from {lowest} to {highest}" if whole else ""
        shapes = " and ".join(str(list(t.shape)) for t in as_tuple(output))
        raise TrainingError(
            f"the loss {type(loss).__name__} cannot take the targets of {whose}, "
            f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}{span}, with the model's output {shapes}"
            f": {error}"
        ) from None


def check_shapes(setup: Setup) -> None:
    """Pass a micro-batch through the model and its loss on the meta device, without memory.

    Raises:
        UserError: A layer cannot take its input, its output cannot be passed on, the state that it changes would
            depend on the layout, or its shapes depend on numbers but must be known in advance. The message names it.
    """
    loss, batch = setup.chain.loss, setup.sample
    samples = known_samples(setup.data, batch)
    sample = batch.to("meta").map(lambda t: converted(t, torch.float32))  # that of the layers below
    tensors, at, known = sample.input_tensors, "", True
    copies = len(setup.plan.stages) > 1 or setup.plan.shards > 1 or setup.cfg.train.activation_checkpointing
    needs_shapes = setup.plan.pipelined or setup.cfg.train.compile or setup.cfg.mode == "plan"
    try:
        kinds = RealKinds(sample, samples)
        layers = setup.chain.skeleton()
        first = _replace_parameters(layers)
        for name, layer in layers.items():
            at = f"layer {name!r} ({type(layer).__name__}): "
            calls, accesses, failed = _calls_of_batchnorm(name, layer), Accesses(layer), None
            try:
                with kinds, accesses:
                    output = layer(*tensors)
            except _ERRORS as error:
                if isinstance(error, (NotImplementedError, TypeError)):  # .tolist(), .numpy(), .cpu()
                    known = known and not any(word in str(error) for word in ("meta tensor", "meta device"))
                if setup.plan.device_type != "cpu" or kinds.refused or accesses.data_dependent or not known:
                    raise
                failed = error
            finally:
                known = known and not accesses.data_dependent
                if any(_is_stale(parameter, first) for parameter in accesses.others):
                    raise ModelError(f"{at}{_STALE}")
                if needs_shapes and not known:
                    raise reads_numbers(name, layer)
            if failed is not None:
                output = _computed(setup, name, batch, tensors, failed)
            if twice := next((norm for norm, count in calls.items() if count > 1), None):
                raise ModelError(
                    f"{at}its forward calls the BatchNorm {twice!r} {calls[twice]} times, and the running "
                    "statistics would be those of the last call: make one BatchNorm for each call, or call it once "
                    "with all of them (torch.cat)"
                )
            if copies and len(written := accesses.wrote(tensors)) > len(set(written)):
                raise ModelError(
                    f"{at}it changes an input in place that has the memory of another of its inputs. Stages, "
                    "sharded layers and train.activation_checkpointing=true have a copy of each: return x.clone() "
                    "from the layer before, or leave the change in place out"
                )
            # Or has a cache been filled?
            if failed is None and setup.cfg.mode != "eval" and accesses.changed() is not None:
                with Accesses(layer) as accesses:
                    layer(*tensors)
                _check_changed(setup, at, accesses.changed())
            at, given = "", tensors
            tensors = checked(name, layer, output)
        if (own := loss_of(layer)) is not None:
            at = f"layer {name!r} ({type(layer).__name__}) computes the loss itself, beside the given one: "
            with kinds:
                sums = own(*given, sample.targets, None)
            if isinstance(sums, Sums) and len(sums.metrics) != len(loss.metrics):
                raise ModelError(
                    f"{at}its loss() returns {len(sums.metrics)} metrics, and {type(loss).__name__} names "
                    f"{len(loss.metrics)} ({', '.join(loss.metrics)}): give a loss with the metrics of the layer's"
                )
        at = f"loss {type(loss).__name__}: "
        with kinds:
            sums = copy_to_try(loss)(output, sample.targets, None)
        check_loss_value(loss, sums, setup.plan.parameters > 0)
        whole = samples[0] is not batch  # otherwise only one sample is known, which says nothing about the others
        if whole and samples[0].targets.numel() and (samples[0].targets == IGNORED).all():
            raise TrainingError(f"no target counts: all {len(samples[0]):,} samples to train on are {IGNORED}, ignored")
        for sample in samples:
            check_labels(loss, output, len(batch), sample.targets, "this data" if whole else "the first sample")
    except UserError:
        raise
    except _ERRORS as error:
        if not known:
            return  # a layer reads numbers, which the meta device does not have: errors after it show in the run
        said = str(error)
        if at and "meta" in said and "device" in said:
            said = (
                "it computes with a tensor that is not on its input's device; keep such a tensor by register_buffer, "
                "make it with device=x.device"
            )
        raise TrainingError(
            f"model={setup.cfg.model.name} cannot take this data: samples "
            f"{' and '.join(map(_described, batch.input_tensors))} with targets {_described(batch.targets)} "
            f"({at}{said})"
        ) from None
    except Exception as error:
        add_note(error, f"raised in {at.removesuffix(': ') or 'the model'}, tried on a micro-batch without memory")
        raise


def _computed(setup: Setup, name: str, batch: Batch, tensors: Sequence[Tensor], error: Exception) -> Tensors:
    """Return the output, on the meta device, of a layer that torch cannot compute there, from numbers on the CPU.

    Its input is that of the model, or drawn. Raises the error if the layer does not compute that either.
    """
    first = name == setup.chain.names[0]
    inputs = batch.map(lambda t: converted(t, torch.float32)).input_tensors
    if not first:
        inputs = tuple(torch.rand(t.shape).to(t.dtype).requires_grad_(t.requires_grad) for t in tensors)
    try:
        layer = setup.chain.build([name], 0, torch.device("cpu"))[name]
        output = layer(*inputs)
    except Exception as failure:  # a user's code
        if any(word in str(error).lower() for word in ("meta", "fake", "no rule")):
            error = type(error)(str(failure)) if isinstance(failure, _ERRORS) else error
        raise error from None
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in as_tuple(output)]
    return tuple(meta) if isinstance(output, tuple) else meta[0]


def _replace_parameters(layers: Layers) -> Collection[nn.Parameter]:
    """Replace the parameters of layers on the meta device, as a run does. Returns the first ones."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # several names may share a parameter
    for module in layers.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = nn.Parameter(parameter.detach(), parameter.requires_grad)
            setattr(module, name, made[parameter])
    return made.keys()


def _is_stale(parameter: nn.Parameter, first: Collection[nn.Parameter]) -> bool:
    """Return whether a run would compute with this parameter and train another one in its place."""
    return parameter in first or (parameter.requires_grad and parameter.device.type != "meta")


def _calls_of_batchnorm(name: str, layer: nn.Module) -> Counter[str]:
    """Return the calls of each BatchNorm in a layer that updates its statistics; they are counted from now on."""
    calls: Counter[str] = Counter()
    for path, norm in layer.named_modules(prefix=name):
        if isinstance(norm, StepBatchNorm) and norm.training:
            norm.register_forward_pre_hook(lambda *_, path=path: calls.update([path]))
    return calls


def _check_changed(setup: Setup, at: str, tensor: str | None) -> None:
    """Check that a layer which changes its state in training does so once per step, for the whole batch.

    This is what ``single`` does by default, and what users of torch expect.
    """
    plan, train = setup.plan, setup.cfg.train
    cut = {f"parallel.dp={plan.dp}": plan.dp > 1, f"parallel.chunks={plan.chunks}": plan.chunks > 1}
    cut["train.activation_checkpointing=true"] = train.activation_checkpointing
    cut[f"parallel={plan.strategy}"] = bool(plan.devices) and len(plan.stages) == 1
    reasons = [words for words, holds in cut.items() if holds]
    if tensor is not None and reasons:
        raise PlanError(
            f"{at}it changes its {tensor!r} in every training forward, so with {' and '.join(reasons)} it would depend "
            "on how the batch is cut. Use models.batchnorm (BatchNorm1d, 2d and 3d, which update once per step) for "
            "BatchNorm, a layer without such state otherwise, or let the whole batch pass at once: parallel=single "
            "parallel.chunks=1 train.activation_checkpointing=false"
        )


def _described(tensor: Any) -> str:
    return f"{tuple(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"


def check_length_of_run(setup: Setup) -> None:
    """Count the steps of the run, which raises DataError if the data have too few samples for one."""
    setup.per_epoch, setup.total_steps  # noqa: B018
