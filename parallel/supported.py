"""Checks that a layout supports a model: the checks of its axes, and one sentence for each fact of the examination."""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import ModelError, PlanError
from models.chain import Chain, Layers
from parallel.axes import known_axes
from parallel.examination import Examination, Facts
from parallel.gathering import divides_samples, refuse_to_gather
from parallel.layout import Layout

_STALE = (
    "its forward uses a parameter that is not an attribute of the module or of a module in it. A list, a dict, a "
    "functools.partial, a lambda or another object holds it, and keeps the first one when a run makes others, to build "
    "the layer and to divide it among ranks. Use self.weight, nn.ModuleList, nn.ModuleDict or nn.ParameterList"
)


def check_supported(
    layout: Layout,
    chain: Chain,
    skeleton: Layers,
    stages: Sequence[Sequence[str]],
    passed: set[tuple] | None = None,
) -> None:
    """Check that a layout can divide a model.

    Args:
        layout: The layout.
        chain: The model.
        skeleton: Its layers, without memory.
        stages: The names of the layers of each stage.
        passed: The axes, each with its values, of layouts that passed this check before. The axes of ``layout`` are
            added.

    Raises:
        PlanError: If the layout does not support the model.
        ModelError: If the model has to change.
    """
    passed = set() if passed is None else passed
    for axis in known_axes(layout):
        key = axis, *(getattr(layout, name) for name in axis.keys)
        if key not in passed:
            axis.check(layout, chain, skeleton)
            passed.add(key)
        axis.check_stages(layout, chain, skeleton, stages)


def check_facts(found: Examination, chain: Chain, layout: Layout, recompute: bool, trains: bool = True) -> None:
    """Check that layers and loss compute the same numbers in a layout as in one process.

    A layer that changes its state in training must do so once per step, for the whole batch. ``single`` does this by
    default, and users of torch expect it.

    Args:
        found: The result of the examination.
        chain: The model.
        layout: The layout.
        recompute: Whether activations are recomputed in the backward.
        trains: Whether the model is trained, not evaluated.

    Raises:
        PlanError: If the layout does not support a layer or the loss.
        ModelError: If a layer has to change.
    """
    if divides_samples(layout) and found.which("gathers"):
        refuse_to_gather(layout)
    copied = {*chain.copied, *chain.copied.values()}
    for facts in found.layers:
        if layout.sequence and facts.sums and facts.name in (found.names[0], found.names[-2]):
            raise PlanError(
                f"layer {facts.name!r} ({facts.kind}) has an auxiliary loss, and parallel.sequence=true divides the "
                "sequence between the first layer and the last one; leave parallel.sequence out"
            )
        _check_layer(facts, layout, recompute, trains)
        if trains and (shared := next((name for name in facts.changes if f"{facts.name}.{name}" in copied), None)):
            raise ModelError(
                f"layer {facts.name!r} ({facts.kind}): it changes its {shared!r} in every training forward, and "
                "another layer has the same tensor, of which each layer would have a copy: give each layer a tensor of "
                "its own, or put the layers that share it into one module with its own forward"
            )
    for axis in known_axes(layout):
        axis.check_facts(layout, chain, found, recompute)


def _check_layer(facts: Facts, layout: Layout, recompute: bool, trains: bool) -> None:
    at = f"layer {facts.name!r} ({facts.kind}): "
    if facts.makes and trains:
        raise ModelError(
            f"{at}its forward makes {facts.makes[0]!r}, which the model of a resumed run would not have: make it in "
            "__init__(), or register it with persistent=False if each run computes it"
        )
    if facts.stale:
        raise ModelError(f"{at}{_STALE}")
    if twice := next((norm for norm, count in facts.norms.items() if count > 1), None):
        raise ModelError(
            f"{at}its forward calls the BatchNorm {twice!r} {facts.norms[twice]} times, and the running statistics "
            "would be those of the last call: make one BatchNorm for each call, or call it once (torch.cat)"
        )
    if facts.reentrant and layout.dp > 1 and not layout.info.sharded:  # in DDP
        raise PlanError(
            f"{at}it calls torch.utils.checkpoint with use_reentrant=True, which DistributedDataParallel does not "
            "support: set use_reentrant=False, or use parallel=fsdp"
        )
    if facts.aliases and (layout.pp > 1 or layout.shards > 1 or recompute):
        raise ModelError(
            f"{at}it changes an input in place that has the memory of another of its inputs. Stages, sharded layers "
            "and train.activation_checkpointing=true have a copy of each: return x.clone() from the layer before"
        )
    if facts.spoils and recompute:
        raise ModelError(
            f"{at}it changes a tensor in place that its backward needs, which torch does not notice in a "
            "recomputation: compute a new one (x = x + 1 in place of x += 1). With "
            "train.activation_checkpointing=false torch's error names the operator"
        )
    if facts.sums and trains and layout.devices and layout.pp == 1:
        raise PlanError(
            f"{at}it has an auxiliary loss over the global batch (models.auxiliary), and parallel={layout.strategy} "
            "computes copies of the model in threads; use parallel=ddp"
        )
    if not facts.changes or not trains:
        return
    cut = {f"parallel.dp={layout.dp}": layout.dp > 1, f"parallel.chunks={layout.chunks}": layout.chunks > 1}
    cut["train.activation_checkpointing=true"] = recompute
    cut[f"parallel={layout.strategy}"] = bool(layout.devices) and layout.pp == 1
    reasons = [words for words, holds in cut.items() if holds]
    if reasons:
        raise PlanError(
            f"{at}it changes its {facts.changes[0]!r} in every training forward, so with {' and '.join(reasons)} it "
            "would depend on how the batch is cut. Use models.batchnorm (BatchNorm1d, 2d and 3d, which update once per "
            "step) for BatchNorm, a layer without such state otherwise, or let the whole batch pass at once: "
            "parallel=single parallel.chunks=1 train.activation_checkpointing=false"
        )
