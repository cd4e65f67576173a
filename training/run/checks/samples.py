"""Checks on a first batch, before any process starts: splits, dtypes, labels, and the values that the loss returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common.errors import DataError, ModelError, PlanError, TrainingError, UserError, add_note
from data.dataset import ONE_TARGET, Batch, Source
from models.chain import LOSS, Tensors, as_tuple
from models.losses import IGNORED, Sums, check_sums, copy_to_try
from parallel.examination import ERRORS, MOST_OUTPUTS, REENTRANT, Facts, made_up, reads_numbers
from parallel.layout import Layout

if TYPE_CHECKING:
    from training.run.setup import Setup

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
    try:
        copy_to_try(loss)(made_up(output), targets, None)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        span = f" from {lowest} to {highest}" if whole else ""
        shapes = " and ".join(str(list(t.shape)) for t in as_tuple(output))
        raise TrainingError(
            f"the loss {type(loss).__name__} cannot take the targets of {whose}, "
            f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}{span}, with the model's output {shapes}"
            f": {error}"
        ) from None


def check_shapes(setup: Setup) -> None:
    """Check the facts of the layers and of the loss.

    Raises:
        UserError: A layer cannot take its input, its output cannot be passed on, the state that it changes would
            depend on the layout, or its shapes depend on numbers but must be known in advance. The message names it.
    """
    plan, loss, batch, samples, at, known = setup.plan, setup.chain.loss, setup.sample, setup.known, "", True
    needs_shapes = plan.pipelined or setup.cfg.train.compile or setup.cfg.mode == "plan"
    try:
        found = setup.examination
        for facts in found.layers:
            at, known = f"layer {facts.name!r} ({facts.kind}): ", known and not facts.reads_numbers
            if facts.stale:
                raise ModelError(f"{at}{_STALE}")
            if needs_shapes and not known:
                raise reads_numbers(facts.name, facts.kind)
            if facts.error is not None and (not facts.outputs or plan.device_type != "cpu"):
                raise facts.error
            if twice := next((norm for norm, count in facts.norms.items() if count > 1), None):
                raise ModelError(
                    f"{at}its forward calls the BatchNorm {twice!r} {facts.norms[twice]} times, and the running "
                    "statistics would be those of the last call: make one BatchNorm for each call, or call it once "
                    "with all of them (torch.cat)"
                )
            check_layer(facts, plan, plan.recompute, setup.cfg.mode != "eval")
        if (facts := found.loss) is not None:
            at, name = f"loss {type(loss).__name__}: ", getattr(loss, "__name__", type(loss).__name__)
            if facts.name != LOSS:
                at = f"layer {facts.name!r} ({facts.kind}) computes the loss itself, beside the given one: "
                name = f"{facts.kind}.loss"
            if facts.error is not None and not (facts.outputs and (facts.reads_numbers or plan.device_type == "cpu")):
                raise facts.error
            sums = facts.outputs[0]
            if facts.name != LOSS and isinstance(sums, Sums) and len(sums.metrics) != len(loss.metrics):
                raise ModelError(
                    f"{at}its loss() returns {len(sums.metrics)} metrics, and {type(loss).__name__} names "
                    f"{len(loss.metrics)} ({', '.join(loss.metrics)}): give a loss with the metrics of the layer's"
                )
            check_sums(name, loss.metrics, sums)
            if plan.parameters and not sums.loss.requires_grad:
                raise TrainingError(
                    f"the loss {name} is not differentiable: leave out detach(), item(), argmax() and no_grad()"
                )
        if samples and samples[0].targets.numel() and (samples[0].targets == IGNORED).all():
            raise TrainingError(f"no target counts: all {len(samples[0]):,} samples to train on are {IGNORED}, ignored")
        for sample in samples or [batch]:  # one sample says nothing about others
            of = "this data" if samples else "the first sample"
            check_labels(loss, found.layers[-1].outputs[0], len(batch), sample.targets, of)
    except UserError:
        raise
    except ERRORS as error:
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
            f"({'' if said.startswith(at.removesuffix(': ')) else at}{said})"
        ) from None
    except Exception as error:
        add_note(error, f"raised in {at.removesuffix(': ') or 'the model'}, tried on a micro-batch without memory")
        raise


def check_layer(facts: Facts, layout: Layout, recompute: bool, trains: bool = True) -> None:
    """Check that a layer computes in a layout what it computes in one process.

    A layer that changes its state in training must do so once per step, for the whole batch. This is what ``single``
    does by default, and what users of torch expect.

    Raises:
        PlanError: The layout does not support the layer.
        ModelError: The layer has to change.
    """
    at = f"layer {facts.name!r} ({facts.kind}): "
    if facts.reentrant and layout.strategy in ("ddp", "pipe_ddp") and layout.dp > 1:
        raise PlanError(f"{at}it {REENTRANT}")
    if facts.aliases and (layout.pp > 1 or layout.shards > 1 or recompute):
        raise ModelError(
            f"{at}it changes an input in place that has the memory of another of its inputs. Stages, sharded layers "
            "and train.activation_checkpointing=true have a copy of each: return x.clone() from the layer before, or "
            "leave the change in place out"
        )
    if facts.spoils and recompute:
        raise ModelError(
            f"{at}it changes a tensor in place that its backward needs, which torch does not notice in a "
            "recomputation: compute a new one (x = x + 1 in place of x += 1). With "
            "train.activation_checkpointing=false torch's error names the operator"
        )
    if facts.changes is None or not trains:
        return
    cut = {f"parallel.dp={layout.dp}": layout.dp > 1, f"parallel.chunks={layout.chunks}": layout.chunks > 1}
    cut["train.activation_checkpointing=true"] = recompute
    cut[f"parallel={layout.strategy}"] = bool(layout.devices) and layout.pp == 1
    reasons = [words for words, holds in cut.items() if holds]
    if reasons:
        raise PlanError(
            f"{at}it changes its {facts.changes!r} in every training forward, so with {' and '.join(reasons)} it would "
            "depend on how the batch is cut. Use models.batchnorm (BatchNorm1d, 2d and 3d, which update once per step) "
            "for BatchNorm, a layer without such state otherwise, or let the whole batch pass at once: parallel=single "
            "parallel.chunks=1 train.activation_checkpointing=false"
        )


def _described(tensor: Any) -> str:
    return f"{tuple(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"


def check_length_of_run(setup: Setup) -> None:
    """Count the steps of the run, which raises DataError if the data have too few samples for one."""
    setup.per_epoch, setup.total_steps  # noqa: B018
