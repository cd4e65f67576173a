"""Named layers that are built, and what passes between them: a tensor, or a flat tuple of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

Tensors = Tensor | tuple[Tensor, ...]  # what passes between layers


def as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """Return a tensor as a tuple of one, and a tuple as it is."""
    return tensors if isinstance(tensors, tuple) else (tensors,)


def checked(name: str, layer: nn.Module, output: Tensors) -> tuple[Tensor, ...]:
    """Return a layer's output as a tuple.

    Raises:
        TypeError: It is neither a tensor nor a flat tuple of tensors.
    """
    tensors = as_tuple(output)
    for one in tensors:
        if not isinstance(one, Tensor):
            kind = type(one).__name__ + (" in a tuple" if isinstance(output, tuple) else "")
            raise TypeError(
                f"layer {name!r} ({type(layer).__name__}) returned a {kind}; return a tensor or a flat tuple of tensors"
            )
    return tensors


class Layers(nn.Module):
    """Consecutive named layers. Dots in names become nesting, so that keys read ``h.0.attn.c_attn.weight``."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.names = [name for name, _ in layers]
        for name, layer in layers:
            *parents, last = name.split(".")
            node: nn.Module = self
            for part in parents:
                if part not in node._modules:
                    node.add_module(part, nn.Module())
                node = node.get_submodule(part)
            node.add_module(last, layer)

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(name)

    def items(self) -> list[tuple[str, nn.Module]]:
        """Return (name, layer), first to last."""
        return [(name, self[name]) for name in self.names]

    def forward(self, *tensors: Tensor) -> Tensors:
        """Compute all layers in order, from the batch's inputs or what the layer before returned, without the loss."""
        output: Tensors = tensors
        for _, layer in self.items():
            output = layer(*as_tuple(output))
        return output

    def tie(self, tied: Mapping[str, str]) -> None:
        """Make {alias: original} one Parameter where both are among these layers."""
        own = dict(self.named_parameters(remove_duplicate=False))
        for alias, original in tied.items():
            if alias in own and original in own:
                module, _, attribute = alias.rpartition(".")
                setattr(self.get_submodule(module), attribute, own[original])
