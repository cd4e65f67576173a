"""Checks the loss: its result for a micro-batch, its metrics, and whether it takes the targets of the data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from common.errors import ModelError, TrainingError
from data.dataset import Batch
from models.chain import LOSS, Tensors, as_tuple
from models.losses import IGNORED, Several, Sums, check_sums, copy_to_try, is_by_sample
from parallel.examination import MOST_OUTPUTS, Facts, made_up

if TYPE_CHECKING:
    from training.run.setup import Setup


def loss_name(loss: Any, facts: Facts) -> str:
    """Return the name of the loss for messages: the given loss, or the last layer's method that computes the loss."""
    return f"{facts.kind}.loss" if facts.name != LOSS else getattr(loss, "__name__", type(loss).__name__)


def check_result(setup: Setup, facts: Facts) -> None:
    """Check the result of the loss for a micro-batch. Raises the error of the loss, TrainingError or ModelError."""
    loss, plan, name = setup.chain.loss, setup.plan, loss_name(setup.chain.loss, facts)
    if isinstance(targets := setup.sample.targets, tuple) and is_by_sample(loss) and not isinstance(loss, Several):
        raise TrainingError(
            f"each sample has {len(targets)} targets, and the loss {name} takes one; give one loss for each: "
            "model.loss=[{_target_: torch.nn.CrossEntropyLoss}, {_target_: torch.nn.MSELoss}]"
        )
    if facts.error is not None and not (facts.outputs and (facts.reads_numbers or plan.device_type == "cpu")):
        raise facts.error
    sums = facts.outputs[0]
    if facts.name != LOSS and isinstance(sums, Sums) and len(sums.metrics) != len(loss.metrics):
        raise ModelError(
            f"layer {facts.name!r} ({facts.kind}) computes the loss itself, beside the given one: its loss() returns "
            f"{len(sums.metrics)} metrics, and {type(loss).__name__} names {len(loss.metrics)} "
            f"({', '.join(loss.metrics)}): give a loss with the metrics of the layer's"
        )
    check_sums(name, loss.metrics, sums)
    if plan.parameters and not sums.loss.requires_grad:
        raise TrainingError(f"the loss {name} is not differentiable: leave out detach(), item(), argmax(), no_grad()")
    if sums.count.requires_grad:
        raise TrainingError(
            f"the count of the loss {name} is differentiable, and a step takes it for a number: gradients would lack a "
            "term. Give count.detach(), or divide in the loss, by sums over the rows of models.losses.gather()"
        )


def check_targets(setup: Setup, batch: Batch, output: Tensors) -> None:
    """Check that a target counts, and that the loss accepts all known targets with the output for a micro-batch.

    Raises:
        TrainingError: All targets are ignored, or the loss does not accept some targets.
    """
    samples = setup.known
    if samples and samples[0].terms and all((targets == IGNORED).all() for targets in samples[0].target_tensors):
        raise TrainingError(f"no target counts: all {len(samples[0]):,} samples to train on are {IGNORED}, ignored")
    if sum(tensor.numel() for tensor in as_tuple(output)) > MOST_OUTPUTS:
        return
    for sample in samples or [batch]:  # one sample says nothing about others
        of = "this data" if samples else "the first sample"
        loss, given = setup.chain.loss, (output, sample.targets)
        for part, outputs, targets in loss.parts(*given) if isinstance(loss, Several) else [(loss, *given)]:
            if isinstance(targets, Tensor):  # a loss of the user's own may take several
                _check_labels(part, outputs, targets, len(batch), of)


def _check_labels(loss: Any, output: Tensors, targets: Tensor, size: int, whose: str) -> None:
    """Compute the loss of random outputs for ``size`` samples with the largest and the smallest real targets."""
    span = ""
    if not targets.is_floating_point() and targets.numel() > 0:
        each = targets.reshape(len(targets), -1)
        counted = each != IGNORED
        if not counted.any():
            return
        low, high = each.masked_fill(~counted, int(each.max())).amin(1), each.amax(1)
        span = f" from {int(low.min())} to {int(high.max())}"
        targets = targets[torch.stack([high.argmax(), low.argmin()]).repeat(size)[:size]]
    else:
        targets = targets[torch.arange(size) % len(targets)].float()  # as a step places them
    try:
        sums = copy_to_try(loss)(made_up(output), targets, None)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shapes = " and ".join(str(list(t.shape)) for t in as_tuple(output))
        raise TrainingError(
            f"the loss {type(loss).__name__} cannot take the targets of {whose}, "
            f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}{span}, with the model's output {shapes}"
            f": {error}"
        ) from None
    if hasattr(loss, "count") and not math.isclose(sums.count, count := float(loss.count(targets)), rel_tol=1e-4):
        name = type(loss).__name__
        raise TrainingError(f"{name}.count() returns {count:g} for targets of which {name} counts {sums.count:g}")
