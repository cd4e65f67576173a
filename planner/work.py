"""What each layer of a chain computes, moves, keeps and passes on for one sample, counted on tensors without memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from data.dataset import Batch
from models.chain import Chain
from parallel.shape_inference import trace

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class LayerWork:
    """The work of a layer for one sample, forward; a backward is twice as much.

    Attributes:
        name: The layer.
        flops: Of products with weights.
        attention: FLOPs of attention, the masked half included.
        products: How many products there are.
        moved: Bytes that the other operators read and write.
        parameters: The number of its own parameters.
        output: Bytes passed to the next layer.
        kept: Bytes that autograd holds until the backward.
        tied: How many of its parameters another layer has too, whose gradients are added up.
        tensors: How many tensors its parameters are.
        frozen: How many of its parameters are not trained.
    """

    name: str = field(compare=False)  # layers that are alike are equal
    flops: float
    attention: float
    products: int
    moved: float
    parameters: int
    output: float
    kept: float
    tied: int = 0
    tensors: int = 0
    frozen: int = 0

    @property
    def trained(self) -> int:
        """How many of its own parameters get gradients."""
        return self.parameters - self.frozen


class Counted(TorchDispatchMode):
    """Adds up the work of the operators inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.attention = self.moved = 0.0
        self.products = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        packet = getattr(operator, "overloadpacket", operator)
        if packet is _ATTENTION:
            query, keys = args[0].shape, args[1].shape
            self.attention += 4 * prod(query) * keys[2]
            self.products += 2
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=output)
            self.products += 1
        elif operator.namespace != "prim" and not operator.is_view:
            tensors = [t for t in tree_leaves((args, kwargs, output)) if isinstance(t, Tensor)]
            if not any(isinstance(t, nn.Parameter) and t.dim() > 1 for t in tensors):  # casts, once for all samples
                self.moved += sum(t.numel() * t.itemsize for t in tensors)
        return output


def work_of(chain: Chain, sample: Batch, precision: str) -> list[LayerWork]:
    """Count the work of every layer for the samples of a batch, and return it for one of them.

    It is counted as on a CPU, whose operators have the same sizes; what a device fuses is for its efficiency to say.
    """
    skeleton, n = chain.skeleton(), len(sample)
    own = {name: sum(p.numel() for p in layer.parameters()) for name, layer in skeleton.items()}
    tied = {
        name: sum(p.numel() for key, p in layer.named_parameters(name) if key in chain.tied)
        for name, layer in skeleton.items()
    }
    return [
        LayerWork(
            t.name, t.work.flops / n, t.work.attention / n, t.work.products, t.work.moved / n, own[t.name],
            t.output_bytes / n, t.kept / n, tied[t.name], sum(1 for _ in skeleton[t.name].parameters()),
            sum(p.numel() for p in skeleton[t.name].parameters() if not p.requires_grad),
        )
        for t in trace(chain, sample, precision, "cpu", Counted)
    ]  # fmt: skip
