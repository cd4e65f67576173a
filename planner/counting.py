"""Counts of the work of a layer's operators, and of the bytes that a layer keeps for its backward."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

import models.grouped  # noqa: F401  it defines operators
from parallel.watching import Watch

_aten = torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu


def _of_groups(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    """Count the FLOPs of a grouped product: a batch, or groups of rows, columns or summands."""
    return 2 * x.numel() * weight.shape[-1] // (len(x) if x.dim() > weight.dim() else 1)


# FLOPs of operators for which torch has no formula, from their arguments.
_FORMULAS: dict[Any, Callable[..., float]] = {
    _aten.mkldnn_rnn_layer: lambda x, w, u, *_, **__: 2 * x.shape[:-1].numel() * (w.numel() + u.numel()),
    _aten._trilinear: lambda x, w, *_, **__: 2 * x.shape[:-1].numel() * w.numel(),  # nn.Bilinear
    _aten._grouped_mm: _of_groups,
    torch.ops.one_word_parallel.grouped_mm: lambda x, weights, *_, **__: 2 * x.numel() * weights.shape[-1],
    torch.ops.one_word_parallel.grouped_outer_mm: lambda x, y, *_, **__: 2 * x.numel() * y.shape[-1],
    _aten.mv: lambda matrix, *_, **__: 2 * matrix.numel(),
    _aten.addmv: lambda _, matrix, *__, **___: 2 * matrix.numel(),
    _aten.dot: lambda x, *_, **__: 2 * x.numel(),
    _aten._euclidean_dist: lambda x, y, *_, **__: 2 * x.numel() * y.shape[-2],
    _aten._cdist_forward: lambda x, y, *_, **__: 3 * x.numel() * y.shape[-2],
}
_KNOWN = ("aten", "prims", "one_word_parallel")  # namespaces of operators that may be left uncounted
# Operators without a formula that do more than a little computation per number.
_LARGE = re.compile(r"_mm$|attention|dist_|cholesky|ctc_loss|fft|linalg_(?!check|vector)|matrix_exp|rnn|sparse|triang")


class Measure(Watch):
    """Adds up the bytes that autograd keeps of a micro-batch for its backward, and the work of the operators.

    Attributes:
        kept: Bytes of the storages that autograd saves, each storage once.
        flops, attention, masked, products, moved, queries, keys, routed: See ``planner.work.LayerWork``; here the
            values are for the micro-batch.
        moved_by_width: The bytes of ``moved`` by the last dimension of an operator's largest tensor.
        uncounted: The operators that have no formula for their FLOPs.
    """

    def __init__(self, known: dict[int, Tensor], experts: Collection[type] = ()) -> None:
        """Start from 0.

        Args:
            known: Storages that do not count as kept, by address. Storages that are kept are added.
            experts: The classes of the modules of experts (``models.cut.Experts``).
        """
        from torch.utils.flop_counter import flop_registry  # late: it looks for Triton

        super().__init__()
        self.kept = self.products = 0
        self.flops = self.attention = self.masked = self.moved = 0.0
        self.queries = self.keys = self.routed = 0.0
        self.moved_by_width: dict[int, float] = defaultdict(float)
        self.uncounted: set[str] = set()
        self._known, self._formulas = known, flop_registry | _FORMULAS
        self._hooks, self._experts = ExitStack(), tuple(experts)

    def __enter__(self) -> Measure:
        super().__enter__()
        self._hooks.enter_context(saved_tensors_hooks(self._hold, lambda tensor: tensor))
        if self._experts:
            self._hooks.callback(register_module_forward_pre_hook(self._called).remove)
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._hooks.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def _called(self, module: nn.Module, given: tuple) -> None:
        if isinstance(module, self._experts):
            tokens, chosen, *_ = given
            self.routed += chosen.numel() * tokens.shape[-1]

    def _hold(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and (storage := tensor.untyped_storage())._cdata not in self._known:
            self._known[storage._cdata] = tensor  # otherwise its address could be reused
            self.kept += storage.nbytes()
        return tensor

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(operator, OpOverload):
            self.compiles = True
            self.uncounted.add(str(operator))
            return operator(*args, **kwargs)
        output = operator(*args, **kwargs)
        if operator is _aten.mkldnn_rnn_layer.default and not output[3].numel():
            # Fake tensors do not know the size of oneDNN's workspace. The bytes that an LSTM keeps there in each step
            # of a sequence were measured with torch 2.13.
            x, state, hidden = args[0], args[5], args[10]
            steps = x.shape[:-1].numel() + state.shape[:-1].numel()
            self.kept += x.itemsize * steps * (9 * hidden + 6 * max(hidden, x.shape[-1]))
        self._count(operator, args, kwargs, output)
        return output

    def _count(self, operator: OpOverload, args: tuple, kwargs: dict, output: Any) -> None:
        packet = operator.overloadpacket
        if packet is _ATTENTION:
            query, keys = args[0].shape, args[1].shape
            flops = 4 * prod(query) * keys[2]
            self.attention += flops
            self.queries += args[0].numel()
            self.keys += args[1].numel() + args[2].numel()
            self.masked += flops / 2 if (args[4] if len(args) > 4 else kwargs.get("is_causal")) else 0.0
            self.products += 2
        elif packet in self._formulas:
            self.flops += self._formulas[packet](*args, **kwargs, out_val=output)
            self.products += 1
            if packet is _aten.baddbmm:  # scores without a kernel (models.attention)
                self.queries += args[1].numel()
                self.keys += 2 * args[2].numel()
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
