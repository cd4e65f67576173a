"""Counts the work of each layer of a chain for one sample, on tensors without memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.dataset import Batch
from models.chain import Chain
from models.cut import experts_of
from parallel.axes.axis import Collective
from parallel.shape_inference import trace
from planner.counting import Measure
from planner.layout import PlannedLayout

# Of the 34 bytes that a GPT block keeps, tensor parallelism alone leaves 10 whole (Korthikanti et al. 2022).
_WHOLE = 10 / 34


class Tie(NamedTuple):
    """Parameters of a layer that belong to another layer, the ``owner``; some are frozen."""

    owner: str
    parameters: float
    frozen: float = 0


@dataclass(frozen=True)
class LayerWork:
    """The work of a layer's forward for one sample. A backward takes twice as much.

    ``_for_a_sample`` names the numbers that ``Measure`` counts, and ``divided`` those that tensor parallelism divides.

    Attributes:
        name: The name of the layer.
        flops: FLOPs of products with weights.
        attention: FLOPs of attention, including the masked half.
        products: The number of products.
        moved: Bytes that other operators read and write.
        parameters: The number of the layer's own parameters.
        output: Bytes passed to the next layer.
        kept: Bytes that autograd holds until the backward.
        ties: The parameters that are tied to another layer. Their gradients are summed.
        tensors: The number of parameter tensors.
        frozen: The number of frozen parameters.
        cast: Bytes of the layer's weights in the compute dtype; independent of samples.
        hidden: The number of elements of the layer's output. A block's collectives of tensor parallelism send them in
            the compute dtype.
        whole: The bytes of ``moved`` that tensor parallelism leaves whole, unless ranks split the sequence. These are
            the bytes of operators that are as wide as the output (norms, residual connections, dropout).
        masked: The FLOPs of ``attention`` that the attention kernel skips.
        kept_whole: The bytes of ``kept`` that tensor parallelism leaves whole, unless ranks split the sequence; None if
            they are not counted.
        gathered: The number of elements, besides ``kept``, that a rank gathers from other ranks and keeps until the
            backward.
        queries: The number of elements of the queries of attention.
        keys: The number of elements of the keys and values of attention.
        routed: The number of elements of the tokens that a router sends to experts, once for each expert of a token.
        experts: The number of parameters of experts (``models.cut.Experts``).
        frozen_experts: The number of those that are frozen.
        uncounted: The operators that have no formula for their FLOPs.
    """

    name: str = field(compare=False)  # layers that differ only in their names are equal
    flops: float
    attention: float
    products: int
    moved: float
    parameters: float
    output: float
    kept: float
    ties: tuple[Tie, ...] = ()
    tensors: int = 0
    frozen: float = 0
    cast: float = 0
    hidden: float = 0
    whole: float = 0
    masked: float = 0
    kept_whole: float | None = None
    gathered: float = 0
    queries: float = 0
    keys: float = 0
    routed: float = 0
    experts: float = 0
    frozen_experts: float = 0
    uncounted: frozenset[str] = frozenset()

    @property
    def trained(self) -> float:
        """The number of the layer's own parameters that get gradients."""
        return self.parameters - self.frozen

    @property
    def length(self) -> float:
        """The number of tokens that attention mixes. Attention takes four FLOPs per token and element of the output."""
        return self.attention / (4 * self.hidden) if self.hidden else inf

    @property
    def tied_trained(self) -> float:
        """The number of tied parameters that get gradients."""
        return sum(tie.parameters - tie.frozen for tie in self.ties)

    def divided(self, ranks: int, between: bool) -> LayerWork:
        """Return the work of one of ``ranks`` ranks that split the layer.

        The ranks split products and parameters and, with ``between``, also the operators between the products.
        """

        def part(size: float, whole: float) -> float:
            return size / ranks if between else whole + (size - whole) / ranks

        kept, gathered = self.kept / ranks, 0.0
        if self.kept_whole is not None:
            kept = part(self.kept, self.kept_whole)
        elif not between:
            kept = part(self.kept, _WHOLE * self.kept)
        elif self.queries:  # in this project the sequence that a block's two regions gather is kept
            gathered = 2 * self.hidden * (1 - 1 / ranks)
        divided = ("flops", "attention", "cast", "hidden", "masked", "queries", "keys")
        return replace(
            self,
            **{key: getattr(self, key) / ranks for key in divided},
            parameters=self.experts + (self.parameters - self.experts) / ranks,
            frozen=self.frozen_experts + (self.frozen - self.frozen_experts) / ranks,
            ties=tuple(Tie(tie.owner, tie.parameters / ranks, tie.frozen / ranks) for tie in self.ties),
            moved=part(self.moved, self.whole),
            output=part(self.output, self.output),
            kept=kept,
            gathered=self.gathered / ranks + gathered,
        )

    def of_tokens(self, ranks: int) -> LayerWork:
        """Return the work of one of ``ranks`` ranks that divide the tokens of each sequence, and not the parameters.

        The ranks have equal work: with causal attention, each has early and late tokens.
        """
        divided = {key: getattr(self, key) / ranks for key in (*_COUNTED, "output", "hidden", "whole", "gathered")}
        return replace(self, **divided, kept_whole=None if self.kept_whole is None else self.kept_whole / ranks)

    def of_experts(self, ranks: int) -> LayerWork:
        """Return the work of one of ``ranks`` ranks that have equally many experts, and compute equally many tokens."""
        fewer, frozen = (count * (1 - 1 / ranks) for count in (self.experts, self.frozen_experts))
        return replace(
            self,
            parameters=self.parameters - fewer,
            frozen=self.frozen - frozen,
            experts=self.experts - fewer,
            frozen_experts=self.frozen_experts - frozen,
            cast=self.cast * (1 - fewer / max(1, self.parameters)),
        )


# The numbers that ``Measure`` counts and that are proportional to the tokens.
_COUNTED = ("flops", "attention", "masked", "moved", "kept", "queries", "keys", "routed")
Works = Sequence[LayerWork]


def shares(layers: Works, layout: PlannedLayout, whole_along: str | None = None) -> Works:
    """Return one rank's part of each layer's work. If two layers are the same object, so are their parts.

    The work is not divided along the axis ``whole_along``.
    """
    if not layout.divided_along:
        return layers
    parts = {id(work): work for work in layers}
    for axis in (axis for name, axis in layout.divided_along if name != whole_along):
        parts = {key: axis.work_of_rank(layout, work) for key, work in parts.items()}
    return [parts[id(work)] for work in layers]


def collectives_of(work: LayerWork, layout: PlannedLayout) -> Iterator[tuple[str, Collective]]:
    """Yield the collectives of a layer, each with the name of the axis along which ranks call it."""
    for name, axis in layout.divided_along:
        (part,) = shares([work], layout, whole_along=name)
        for collective in axis.collectives(layout, part):
            yield name, collective


def sent_of(work: LayerWork, layout: PlannedLayout) -> dict[str, float]:
    """Return the number of elements per sample that a rank sends along each axis for a layer, forward and backward."""
    sent: dict[str, float] = defaultdict(float)
    for name, each in collectives_of(work, layout):
        calls = each.times * (2 if layout.recompute == "full" else 1) + each.backward
        sent[name] += calls * each.sent(layout.sizes[name])
    return sent


def parameters_of(stage: Works) -> tuple[float, float]:
    """Return the numbers of all and of trained parameters of a stage. A tied parameter and its owner count once."""
    parameters, trained = sum(work.parameters for work in stage), sum(work.trained for work in stage)
    if any(work.ties for work in stage):
        names = {work.name for work in stage}
        for tie in (tie for work in stage for tie in work.ties if tie.owner in names):
            parameters -= tie.parameters
            trained -= tie.parameters - tie.frozen
    return parameters, trained


def stored_besides(works: Works, layout: PlannedLayout) -> tuple[float, float]:
    """Return the numbers of all and of trained parameters that come on top of those to be divided by the shards.

    A rank's experts are not sharded among the ranks that have other experts, so their shards are larger.
    """
    if layout.ep == 1 or layout.shards == 1:
        return 0.0, 0.0
    more = layout.ep - 1
    return more * sum(work.experts for work in works), more * trained_experts(works)


def trained_experts(stage: Works) -> float:
    """Return the number of trained parameters of a stage's experts."""
    return sum(work.experts - work.frozen_experts for work in stage)


def weights_of(chain: Chain) -> list[LayerWork]:
    """Count the parameters of every layer. No layer is run."""
    skeleton, layers = chain.skeleton(), []
    owners = {key: name for name, layer in skeleton.items() for key in dict(layer.named_parameters(name))}
    for name, layer in skeleton.items():
        ties = [
            Tie(owner, p.numel(), 0 if p.requires_grad else p.numel())
            for key, p in layer.named_parameters(name)
            if key in chain.tied and (owner := owners[chain.tied[key]]) != name
        ]
        own = [*layer.parameters()]
        experts = [p for module in experts_of(chain.cut, layer, name).values() for p in module.parameters()]
        (parameters, frozen), of_experts = _sizes(own), _sizes(experts)
        work = LayerWork(name, 0, 0, 0, 0, parameters, 0, 0, tuple(ties), len(own), frozen)
        layers.append(replace(work, experts=of_experts[0], frozen_experts=of_experts[1]))
    return layers


def _sizes(parameters: Sequence[nn.Parameter]) -> tuple[int, int]:
    """Return the numbers of all and of frozen parameters."""
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if not p.requires_grad)


def work_of(chain: Chain, batch: Batch, precision: str, samples: int = 1) -> tuple[list[LayerWork], int]:
    """Count the work of every layer for one sample of a batch.

    The operators of a CPU are counted; those of other devices have the same sizes. Fusion is part of a device's
    efficiency.

    Returns:
        The work, and the number of samples of the smallest micro-batch that the layers accept: two if BatchNorm gets
        single numbers.
    """
    some = torch.arange(samples) % len(batch)
    try:
        experts = {type(module) for module in experts_of(chain.cut, chain.skeleton()).values()}
        measure = partial(Measure, experts=experts)
        traces = trace(chain, batch.map(lambda tensor: tensor[some]), precision, "cpu", measure)
    except ValueError:
        if samples > 1:
            raise
        return work_of(chain, batch, precision, samples=2)
    every = zip(weights_of(chain), traces, strict=True)
    return [_for_a_sample(work, *traced, samples) for work, traced in every], samples


def _for_a_sample(work: LayerWork, outputs: Sequence[Tensor], measured: Sequence[Measure], samples: int) -> LayerWork:
    """Return the work of a layer, measured for two micro-batches. Only the first micro-batch casts weights."""
    first, second = measured or (Measure({}), Measure({}))
    uncounted = second.uncounted if measured else {f"layer {work.name!r}"}
    return replace(
        work,
        **{key: getattr(second, key) / samples for key in _COUNTED},
        products=second.products,
        output=sum(x.nbytes for x in outputs) / samples,
        cast=max(0, first.kept - second.kept),
        hidden=sum(x.numel() for x in outputs) / samples,
        whole=sum(second.moved_by_width[n] for n in {x.shape[-1] for x in outputs if x.dim()}) / samples,
        uncounted=frozenset(uncounted),
    )
