"""Counts the work of each layer of a chain for one sample, on tensors without memory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.dataset import Batch
from models.chain import Chain
from parallel.shape_inference import trace

_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu


def _of_groups(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Count the products of groups: of rows, of columns, of what is summed over, or one for each of a batch."""
    return 2 * x.numel() * weight.shape[-1] // (len(x) if x.dim() > weight.dim() else 1)


# FLOPs of operators for which torch has no formula, from their arguments.
_FORMULAS: dict[Any, Callable[..., float]] = {
    _aten.mkldnn_rnn_layer: lambda x, w, u, *_, **__: 2 * x.shape[:-1].numel() * (w.numel() + u.numel()),
    _aten._trilinear: lambda x, w, *_, **__: 2 * x.shape[:-1].numel() * w.numel(),  # nn.Bilinear
    _aten._grouped_mm: _of_groups,
    _aten.mv: lambda matrix, *_, **__: 2 * matrix.numel(),
    _aten.addmv: lambda _, matrix, *__, **___: 2 * matrix.numel(),
    _aten.dot: lambda x, *_, **__: 2 * x.numel(),
    _aten._euclidean_dist: lambda x, y, *_, **__: 2 * x.numel() * y.shape[-2],
    _aten._cdist_forward: lambda x, y, *_, **__: 3 * x.numel() * y.shape[-2],
}
_KNOWN = ("aten", "prims", "one_word_parallel")  # namespaces; of the operators of others, nothing is known
# Operators without a formula whose work is more than a little for each of their numbers.
_LARGE = re.compile(r"_mm$|attention|dist_|cholesky|ctc_loss|fft|linalg_(?!check|vector)|matrix_exp|rnn|sparse|triang")


class Tie(NamedTuple):
    """Parameters of a layer that belong to another layer, the ``owner``; some are frozen."""

    owner: str
    parameters: int
    frozen: int = 0


@dataclass(frozen=True)
class LayerWork:
    """The work of a layer's forward for one sample. A backward is twice as much.

    Attributes:
        name: The layer.
        flops: FLOPs of products with weights.
        attention: FLOPs of attention, the masked half included.
        products: The number of products.
        moved: Bytes that other operators read and write.
        parameters: The number of its own parameters.
        output: Bytes passed to the next layer.
        kept: Bytes that autograd holds until the backward.
        ties: Its parameters that another layer has, too. Their gradients are added up.
        tensors: The number of parameter tensors.
        frozen: The number of parameters that are not trained.
        cast: Bytes of its weights in the compute dtype; independent of samples.
        hidden: The numbers of its output. A block's collectives of tensor parallelism send them in the compute dtype.
        whole: The bytes of ``moved`` that tensor parallelism leaves whole, unless ranks share the sequence: those of
            operators that are as wide as the output (norms, residual connections, dropout).
        masked: The FLOPs of ``attention`` that its kernel leaves out.
        kept_whole: The bytes of ``kept`` that tensor parallelism leaves whole, likewise; None if they are not counted.
        uncounted: What has no formula for its FLOPs.
    """

    name: str = field(compare=False)  # layers that are alike are equal
    flops: float
    attention: float
    products: int
    moved: float
    parameters: int
    output: float
    kept: float
    ties: tuple[Tie, ...] = ()
    tensors: int = 0
    frozen: int = 0
    cast: float = 0
    hidden: float = 0
    whole: float = 0
    masked: float = 0
    kept_whole: float | None = None
    uncounted: frozenset[str] = frozenset()

    @property
    def trained(self) -> int:
        """The number of its own parameters that get gradients."""
        return self.parameters - self.frozen

    @property
    def length(self) -> float:
        """The tokens among which attention mixes: it has four FLOPs for each of them and each number of the output."""
        return self.attention / (4 * self.hidden) if self.hidden else inf

    @property
    def tied_trained(self) -> int:
        """The number of tied parameters that get gradients."""
        return sum(tie.parameters - tie.frozen for tie in self.ties)


Works = Sequence[LayerWork]


def part_of_rank(size: float, whole: float, tp: int, sequence: bool) -> float:
    """Return a rank's part of some bytes, of which ``whole`` are divided only if ranks share the sequence."""
    return size / tp if sequence else whole + (size - whole) / tp


class Counted(TorchDispatchMode):
    """Adds up the work of the operators that run in the block."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        from torch.utils.flop_counter import flop_registry  # late: it looks for Triton

        super().__init__()
        self._formulas = flop_registry | _FORMULAS
        self.uncounted: set[str] = set()
        self.flops = self.attention = self.masked = self.moved = 0.0
        self.products = 0
        self.moved_by_width: dict[int, float] = defaultdict(float)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        if not isinstance(operator, OpOverload):
            self.uncounted.add(str(operator))
            return output
        packet = operator.overloadpacket
        if packet is _ATTENTION:
            query, keys = args[0].shape, args[1].shape
            flops = 4 * prod(query) * keys[2]
            self.attention += flops
            self.masked += flops / 2 if (args[4] if len(args) > 4 else (kwargs or {}).get("is_causal")) else 0.0
            self.products += 2
        elif packet in self._formulas:
            self.flops += self._formulas[packet](*args, **(kwargs or {}), out_val=output)
            self.products += 1
        elif operator.namespace != "prim" and not operator.is_view:
            if operator.namespace not in _KNOWN or _LARGE.search(packet.__name__):
                self.uncounted.add(f"{operator.namespace}.{packet.__name__}")
            tensors = [t for t in tree_leaves((args, kwargs, output)) if isinstance(t, Tensor) and not t.is_nested]
            if not any(isinstance(t, nn.Parameter) and t.dim() > 1 for t in tensors):  # casts, once for all samples
                size = sum(t.numel() * t.itemsize for t in tensors)
                self.moved += size
                largest = max(tensors, key=Tensor.numel, default=None)
                if largest is not None and largest.dim():
                    self.moved_by_width[largest.shape[-1]] += size
        return output


def parameters_of(stage: Works) -> tuple[int, int]:
    """Return the numbers of all and of trained parameters of a stage. A tied one counts once if its owner is there."""
    parameters, trained = sum(work.parameters for work in stage), sum(work.trained for work in stage)
    if any(work.ties for work in stage):
        names = {work.name for work in stage}
        for tie in (tie for work in stage for tie in work.ties if tie.owner in names):
            parameters -= tie.parameters
            trained -= tie.parameters - tie.frozen
    return parameters, trained


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
        parameters = list(layer.parameters())
        sizes = sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if not p.requires_grad)
        layers.append(LayerWork(name, 0, 0, 0, 0, sizes[0], 0, 0, tuple(ties), len(parameters), sizes[1]))
    return layers


def work_of(chain: Chain, batch: Batch, precision: str) -> tuple[list[LayerWork], int]:
    """Count the work of every layer for a sample of a batch.

    The count is that of a CPU's operators, which have the same sizes. Fusion is part of a device's efficiency.

    Returns:
        The work, and the number of samples of the smallest micro-batch that the layers accept: two if BatchNorm gets
        single numbers.
    """
    for least in (1, 2):
        some = torch.arange(least) % len(batch)
        try:
            traces = trace(chain, batch.map(lambda tensor, some=some: tensor[some]), precision, "cpu", Counted)
        except ValueError:
            if least == 2:
                raise
        else:
            break
    return [
        replace(
            work, flops=t.work.flops / least, attention=t.work.attention / least,
            masked=t.work.masked / least, products=t.work.products,
            moved=t.work.moved / least, output=t.output_bytes / least, kept=t.kept / least, cast=t.cast,
            hidden=sum(prod(spec.shape) for spec in t.outputs) / least, uncounted=frozenset(t.work.uncounted),
            whole=sum(t.work.moved_by_width[n] for n in {spec.shape[-1] for spec in t.outputs if spec.shape}) / least,
        )
        for work, t in zip(weights_of(chain), traces, strict=True)
    ], least  # fmt: skip
