"""Torch modes that see each operator of a layer: which tensors it reads and writes, and whether it draws."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.batchnorm import StepBatchNorm

_aten = torch.ops.aten
# Operations whose arguments must all have one dtype; on the meta device they accept any.
_PRODUCTS = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution,
    _aten.native_layer_norm, _aten.native_group_norm, _aten.native_batch_norm,
}  # fmt: skip
_BY_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Refused(ValueError):
    """An error that torch raises on every device except the meta device."""


class Watch(TorchDispatchMode):
    """Sees all operators in the block, including those that take functions."""

    supports_higher_order_operators = True
    compiles = False  # whether there was an operator that takes functions, such as torch.cond

    def __exit__(self, kind, error, trace) -> None:
        super().__exit__(kind, error, trace)
        if (error is not None or self.compiles) and "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # it would go on to refuse functions such as torch.cond, which it met under this mode


class Effects(Watch):
    """Records what the operators of a module do, also on the meta device.

    Attributes:
        draws: Whether an operator draws random numbers.
        data_dependent: Whether a result or a shape depends on numbers, as the result of ``.item()`` does.
        fills: Whether an operator writes into a tensor that it does not return.
        others: The parameters that the module uses but does not own.
    """

    def __init__(
        self, module: nn.Module, followed: Sequence[Tensor] = (), ranges: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        """Record the tensors of the module before its forward.

        Args:
            module: The module.
            followed: Tensors to follow; ``computes`` tells which tensors are computed from them.
            ranges: The lowest and the highest number of each integer tensor, by the tensor's id.
        """
        super().__init__()
        self.draws = self.data_dependent = self.fills = False
        self.others: list[nn.Parameter] = []
        self._module, self._before = module, _tensors_of(module)
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._read: set[int] = set()
        self._written: set[int] = set()
        self._computed = {id(tensor): tensor for tensor in followed}  # which keeps them, and thus their ids
        self._ranges = ranges or {}

    def wrote(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the ids of the storages of the tensors that were changed in place."""
        return [storage for tensor in tensors if (storage := _storage_of(tensor)) in self._written]

    def wrote_others(self) -> bool:
        """Return whether a tensor that does not belong to the module was changed in place."""
        return not self._written <= {*self._before.values()}

    def changed(self) -> list[str]:
        """Return the names of the changed tensors that a later step, or an evaluation, may read.

        A tensor that is neither saved nor read is ignored, because it carries nothing from step to step.
        """
        saved, now = self._module.state_dict().keys(), _tensors_of(self._module)
        changed = ((n, s) for n, s in self._before.items() if s in self._written or now.get(n) != s)
        return [name for name, storage in changed if name in saved or storage in self._read]

    def computes(self, tensor: Any) -> bool:
        """Return whether a tensor is followed, or is computed from a followed tensor."""
        return id(tensor) in self._computed

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(operator, OpOverload):
            self._check(operator.overloadpacket, args)
            self._note(operator, args, kwargs)
        else:
            self.compiles = True
        result = operator(*args, **kwargs)
        if self._computed and ".new_" not in str(operator) and "_like." not in str(operator):  # these use a shape only
            if any(map(self.computes, tree_leaves((args, kwargs)))):
                self._computed |= {id(t): t for t in tree_leaves(result) if isinstance(t, Tensor)}
        return result

    def _note(self, operator: OpOverload, args: tuple, kwargs: dict) -> None:
        schema = operator._schema
        given = {argument.name: argument.default_value for argument in schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        if torch.Tag.nondeterministic_seeded in operator.tags:
            # Attention has this tag because it may apply dropout.
            self.draws |= given.get("dropout_p", given.get("p")) != 0.0
        if not _BY_NUMBERS.isdisjoint(operator.tags):
            self.data_dependent |= not _indexed_by_numbers(operator, args)
        for argument in schema.arguments:
            value = given[argument.name]
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor):
                    if isinstance(tensor, nn.Parameter) and id(tensor) not in self._parameters:
                        self.others.append(tensor)
                    self._access(schema, argument, _storage_of(tensor), given)

    def _access(self, schema, argument, storage: int, given: dict) -> None:
        alias = argument.alias_info
        if argument.name in ("running_mean", "running_var") and (given.get("training") or given.get("train")):
            self._written.add(storage)  # the schema does not say so
        elif alias is None:
            self._read.add(storage)
        elif alias.is_write:
            self._written.add(storage)
            self.fills |= all(result.alias_info is None for result in schema.returns)
            if not argument.is_out and schema.name not in ("aten::copy_", "aten::fill_", "aten::zero_"):
                self._read.add(storage)

    def _check(self, operation: Any, args: tuple) -> None:
        """Refuse inputs that only the meta device accepts: integers in a product with weights, too large tokens."""
        if operation in _PRODUCTS:
            dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor)}
            whole = [str(dtype).removeprefix("torch.") for dtype in dtypes if not dtype.is_floating_point]
            if whole and len(dtypes) > len(whole):
                raise Refused(f"it computes with floating-point numbers and gets {whole[0]}: give inputs.float()")
        elif operation is _aten.embedding and (limits := self._ranges.get(id(args[1]))) is not None:
            rows = len(args[0])
            if not 0 <= limits[0] <= limits[1] < rows:
                raise Refused(f"it embeds 0 to {rows - 1} and gets whole numbers from {limits[0]} to {limits[1]}")


def _indexed_by_numbers(operator: Any, args: tuple) -> bool:
    """Return whether an operator is ``x[indices]``, which has the shape of the indices, and not ``x[mask]``."""
    masks = (torch.bool, torch.uint8)
    return operator is _aten.index.Tensor and all(index is None or index.dtype not in masks for index in args[1])


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def _tensors_of(module: nn.Module) -> dict[str, int]:
    """Return the storages of a module's parameters and buffers by name, without this project's BatchNorm statistics."""
    statistics = {id(b) for norm in module.modules() if isinstance(norm, StepBatchNorm) for b in norm.buffers()}
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.untyped_storage()._cdata for name, tensor in tensors.items() if id(tensor) not in statistics}
