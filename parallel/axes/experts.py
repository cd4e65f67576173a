"""Expert parallelism: replicas share the experts of a mixture, and send each token to the ranks of its experts.

    x, chosen --send--> rows of this rank's experts --> the module's own forward --return--> weights, sum over k

Every replica routes its own tokens. For each of a token's ``k`` experts, a copy of the token is one row. Rows are sent
in the order of their experts, so results do not depend on timing. The weights stay at home, and so does the router's
gradient. Parameters outside of experts, and their gradients, are those of ``parallel.axes.replicas`` or ``shards``.

Known pitfalls of expert parallelism, and how this module handles them:
* A rank may get no rows, or one of its experts may get none. The module's own forward may then return a tensor without
  history, and the backward would leave out this rank's collectives, for which the other ranks wait. The second
  ``AllToAll`` therefore also depends on the received rows, whose gradient is zero then.
* A recomputation begins when the backward needs a tensor of the layer, and stops at the last one. The product with the
  weights saves a tensor after all collectives of a forward, so ranks with and without rows call the same ones.
* An expert's gradient adds up over the tokens of all replicas along ``experts``, so only its copies along the other
  axes of replicas are summed. It is divided by the number of all replicas, as other gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import PlanError, brief
from data.dataset import DataSet
from models.auxiliary import Collected, collecting
from models.chain import CPU, Chain, Layers, LayerSpec, as_tuple
from models.cut import Experts, check_experts, experts_of
from models.seeds import Samples, computing
from parallel.axes.axis import AxisOfStage, Collective
from parallel.axes.exchange import AllToAll
from parallel.examination import Examination
from parallel.layout import Layout
from parallel.mesh import EXPERTS, REPLICAS, SHARDS
from parallel.mixing import is_near, with_noise
from parallel.placement import Split
from parallel.strategies import StrategyInfo, names_where

_TOKENS = 16  # that try a module of experts
_KNOWN = "models.moe.", "transformers."  # modules whose experts are not tried, because large ones take seconds


class ExpertParallel(AxisOfStage):
    """Divides the experts of ``Chain.cut`` among replicas."""

    mesh_axes = (EXPERTS,)
    degree, divides = "ep", "experts"
    keys = ("ep",)
    variants = ({"ep": 2},)

    # -- before a run ------------------------------------------------------------------------------------------------

    @classmethod
    def check_keys(cls, section: Any, info: StrategyInfo) -> None:
        """See ``Axis.check_keys``."""
        if section.ep != 1 and not info.replicas:
            raise PlanError(
                f"parallel={section.name} has one replica, and parallel.ep={section.ep} shares experts among replicas; "
                f"use parallel={', '.join(names_where(replicas=True))}"
            )
        super().check_keys(section, info)
        if section.dp is not None and section.dp % section.ep:
            fits = [str(n) for n in range(2, section.dp + 1) if section.dp % n == 0]
            raise PlanError(
                f"parallel.ep={section.ep} does not divide the parallel.dp={section.dp} replicas, which share the "
                f"experts; set parallel.dp={section.ep}" + f", or parallel.ep to {' or '.join(fits)}" * bool(fits)
            )

    @classmethod
    def allows(cls, info: StrategyInfo, layout: Layout) -> bool:
        """See ``Axis.allows``."""
        return super().allows(info, layout) and layout.dp % layout.ep == 0

    @classmethod
    def check(cls, layout: Layout, chain: Chain, skeleton: Layers) -> None:
        """See ``Axis.check``."""
        if layout.ep > 1:
            check_experts(chain.cut, skeleton, layout.ep)

    @classmethod
    def check_facts(cls, layout: Layout, chain: Chain, found: Examination, recompute: bool = False) -> None:
        """Raise PlanError if a backward is split and recomputes activations, or experts are not a weighted sum."""
        # A weight's backward recomputes its layer again. How many weights have a gradient depends on the rank.
        if layout.ep > 1 and layout.splits_backward and recompute:
            raise PlanError(
                f"parallel.schedule={layout.schedule} recomputes a layer for each of its weights, and ranks with other "
                f"experts (parallel.ep={layout.ep}) would wait for each other; use parallel.schedule=interleaved_1f1b, "
                "or train.activation_checkpointing=false"
            )
        if layout.ep > 1 and found.mixes_experts is None:
            found.mixes_experts = _problem(chain, found)
        if layout.ep > 1 and found.mixes_experts:
            raise PlanError(
                f"parallel.ep={layout.ep} computes each expert of a token by itself, with weight 1: "
                f"{found.mixes_experts}. Normalize weights before the module, or set parallel.ep=1"
            )

    @classmethod
    def choices(cls, chain: Chain, data: DataSet, fixed: Mapping[str, Any], max_ranks: int) -> list[dict[str, Any]]:
        """See ``Axis.choices``. Replicas share experts only if the user has typed so."""
        ep = fixed.get("ep", 1)
        cls.check(Layout(ep=ep), chain, chain.skeleton())
        return [{"ep": ep}]

    @classmethod
    def work_of_rank(cls, layout: Layout, work: Any) -> Any:
        """See ``Axis.work_of_rank``."""
        return work.of_experts(layout.ep)

    @classmethod
    def collectives(cls, layout: Layout, work: Any) -> Sequence[Collective]:
        """See ``Axis.collectives``. Rows go to their experts and come back, and so do their gradients."""
        return [Collective("all_to_all", 2, work.routed, 2)] if work.routed else []

    @classmethod
    def describe(cls, layout: Layout) -> str:
        """See ``Axis.describe``."""
        return f"{layout.ep} replicas share the experts"

    # -- in a rank ---------------------------------------------------------------------------------------------------

    def prepare(self, name: str, layer: nn.Module, tied_in_stage: Sequence[str]) -> None:
        """See ``Axis.prepare``."""
        for path, module in experts_of(self.chain.cut, layer, name).items():
            count, ep = Experts().count(module), self.ranks.size
            split = Split(EXPERTS, 0, (count // ep,) * ep)
            for key, parameter in [*module.named_parameters()]:
                part = nn.Parameter(split.part(parameter.detach(), self.ranks.index), parameter.requires_grad)
                owner, _, own = key.rpartition(".")
                setattr(module.get_submodule(owner), own, part)
                self.splits[self.chain.canonical(f"{path}.{key}")] = split
            if hasattr(module, "num_experts"):
                module.num_experts = count // ep  # pyright: ignore[reportArgumentType]  # its stub knows tensors only
            # The sizes of messages depend on the numbers in ``chosen``, which a compiler does not know.
            forward = torch.compiler.disable(partial(self._compute, module, module.forward))
            module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]

    def averaged_over(self, name: str) -> Sequence[str] | None:
        """See ``Axis.averaged_over``."""
        sharded = self.mesh.axis(SHARDS).size > 1  # FSDP sums their gradients
        return None if name not in self.splits or sharded else [axis for axis in REPLICAS if axis != EXPERTS]

    def _compute(self, module: nn.Module, forward: Callable, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute experts of all ranks: x [n, c], chosen [n, k], weights [n, k] -> [n, c]."""
        k, here, size, group = chosen.shape[1], Experts().count(module), self.ranks.size, self.ranks.group
        counts = chosen.flatten().bincount(minlength=here * size)  # of rows for each expert
        arriving = torch.empty_like(counts)  # of rows from each rank for each expert here
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = torch.stack((counts, arriving)).view(2, size, here).sum(2).tolist()
        experts = torch.arange(here, device=x.device).repeat(size).repeat_interleave(arriving)
        order = chosen.flatten().argsort(stable=True)
        # Indices that do not repeat have a deterministic backward.
        rows = AllToAll.apply(x.repeat_interleave(k, 0).index_select(0, order), group, sent, received)
        computed = forward(rows, experts[:, None], weights.new_ones(len(rows), 1))
        trained = next((p for p in module.parameters() if p.requires_grad), None) if torch.is_grad_enabled() else None
        reached = rows if rows.requires_grad else trained
        results = AllToAll.apply(computed, group, received, sent, reached).index_select(0, order.argsort())
        return (results.unflatten(0, chosen.shape) * weights[..., None]).sum(1).to(computed.dtype)


def _problem(chain: Chain, found: Examination) -> str:
    """Return what is wrong with experts whose output is not a weighted sum over a token's experts; empty if nothing."""
    known = {facts.name: facts for facts in found.layers if facts.outputs}

    def tried(spec: LayerSpec, given: tuple[Tensor, ...]) -> tuple[str, tuple[Tensor, ...]]:
        layer, calls = spec.made(), {}
        for path, experts in experts_of(chain.cut, layer, spec.name).items():
            if f"{type(experts).__module__}.".startswith(_KNOWN):
                continue
            calls[path] = experts, experts.forward, []

            def noted(*args: Any, calls: list = calls[path][-1], **others: Any) -> Tensor:
                calls.append((args, others))
                return torch.zeros_like([*args, *others.values()][0])

            experts.forward = noted  # pyright: ignore[reportAttributeAccessIssue]
        outputs: Any = known[spec.name].outputs[0] if spec.name in known else ()
        with suppress(Exception), collecting(Collected()), computing(Samples(len(given[0]), notes=[])):  # a user's code
            outputs = layer(*given)
        for path, (experts, forward, [*seen]) in calls.items():
            experts.forward = forward
            name = f"{path} ({type(experts).__name__})"
            try:
                if not all(_is_weighted_sum(experts, *args, **others) for args, others in seen[:1]):
                    return f"the output of {name} is not the sum over a token's experts of weight x output", ()
            except Exception as error:  # a user's code
                return f"{name} does not compute forward(x [n, c], chosen [n, k], weights [n, k]) ({brief(error)})", ()
        return "", as_tuple(outputs)

    inputs = () if found.sample is None else found.sample.to("meta").input_tensors
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        return next(filter(None, chain.walk(inputs, lambda spec, x: tried(spec, x) if x else ("", ()))), "")


def _is_weighted_sum(experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> bool:
    """Try few tokens, of which many choose the first experts. The tensors have no numbers."""
    count, k, module = Experts().count(experts), chosen.shape[1], with_noise(experts.to_empty(device=CPU))
    tokens, rows = torch.randn(_TOKENS, *x.shape[1:], dtype=x.dtype), torch.arange(_TOKENS)
    scores = torch.rand(_TOKENS, count) + (torch.arange(count) < k) * (rows % 4 > 0)[:, None]
    chosen, weights = scores.topk(k).indices.to(chosen.dtype), torch.rand(_TOKENS, k).to(weights.dtype) + 0.1
    alone = torch.zeros_like(tokens)
    for half in rows.chunk(2):
        for one, weight in zip(chosen[half].T, weights[half].T, strict=True):
            ones = torch.ones_like(weight)[:, None]
            alone[half] += module(tokens[half], one[:, None], ones) * weight[:, None]
    return is_near(module(tokens, chosen, weights), alone, 1e-2)  # the module may round to bfloat16
