"""LoRA (Hu et al. 2021). Only a product of two small matrices beside each frozen linear layer is trained.

``adapt`` changes the chain of any model. Every weight keeps its name and its initial numbers. A linear layer
``h.0.attn.c_attn`` gets two more matrices, ``h.0.attn.c_attn.lora_A.weight`` and ``h.0.attn.c_attn.lora_B.weight``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ModelError
from models.chain import Chain, LayerSpec, is_within, reset_parameters
from models.fused_cross_entropy import FusedHead


class Factor(nn.Linear):
    """A matrix of an adapter. The first matrix, A, is initialized as torch initializes a linear layer."""


class ZeroFactor(Factor):
    """The second matrix, B. Its initial numbers are 0, so that the adapter changes nothing at first."""

    def reset_parameters(self) -> None:
        """Set all numbers to 0."""
        nn.init.zeros_(self.weight)


class Magnitude(nn.Module):
    """The magnitude of each row of a weight in DoRA, as its difference from the frozen row's, at first 0."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))

    def reset_parameters(self) -> None:
        """Set all numbers to 0."""
        nn.init.zeros_(self.weight)

    def forward(self, y: Tensor, frozen: Tensor, adapted: Tensor) -> Tensor:
        """[..., rows] -> same, from norms ``adapted`` [rows] to the magnitudes, which began as norms ``frozen``."""
        return (y * ((frozen + self.weight) / adapted)).to(y.dtype)


class FrozenLinear(nn.Linear):
    """A linear layer that is not trained, [..., in] -> [..., out].

    Autocast casts the weight for every micro-batch, and torch would keep each cast weight for the backward. Here the
    backward casts the weight again instead.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.computed(x, self.bias)

    def computed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in] -> [..., out], with the given bias instead of the layer's; None for no bias."""
        kind = x.device.type
        if kind == "meta" or not torch.is_autocast_enabled(kind):
            return F.linear(x, self.weight, bias)
        return _CastTwice.apply(x.to(torch.get_autocast_dtype(kind)), self.weight, bias)


class _CastTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight, bias)  # under autocast

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient @ ctx.saved_tensors[0].to(gradient.dtype), None, None


class LoRALinear(FrozenLinear):
    """A frozen linear layer and its adapter: x -> x W' + b + scale dropout(x) A' B', [..., in] -> [..., out].

    DoRA (Liu et al. 2024) also multiplies each output, without b, by its magnitude over the norm of its row of
    W + scale B A, which counts as a constant in the backward. Like peft's, it applies dropout to what it adds only.
    """

    scale: float
    lora_dropout: nn.Dropout
    lora_A: Factor
    lora_B: Factor
    lora_magnitude_vector: Magnitude | None
    add_up: Callable[[Tensor], Tensor] = staticmethod(lambda sums: sums)  # over ranks that divide the inputs

    def computed(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in] -> [..., out], with the given bias instead of the layer's; None for no bias."""
        given = self.lora_dropout(x)
        added = self.scale * self.lora_B(self.lora_A(given))
        if self.lora_magnitude_vector is None:
            return super().computed(x, bias) + added
        product = super().computed(given, None)
        y = self.lora_magnitude_vector(product + added, *self.norms())
        if given is not x:
            y = super().computed(x, None) + (y - product)  # in this order exact in bfloat16 while they are equal
        return y if bias is None else y + bias.to(y.dtype)

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Return the norms of the rows of W and of W + scale B A, [2, out]."""
        kind = self.weight.device.type
        with nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            both = self.weight, self.weight + self.scale * self.lora_B.weight @ self.lora_A.weight
            return self.add_up(torch.stack([matrix.square().sum(dim=1) for matrix in both])).sqrt()


def adapt(
    chain: Chain,
    rank: int,
    alpha: float,
    dropout: float,
    targets: Sequence[str] | None,
    dora: bool = False,
    modules_to_save: Sequence[str] | None = None,
) -> Chain:
    """Freeze a chain and add adapters to its linear layers. Only the adapters are trained.

    Args:
        chain: The base.
        rank: The number of columns of A and of rows of B, at least 1.
        alpha: The scale of the adapter's output, which is multiplied by alpha / rank.
        dropout: The dropout probability for the adapter's input, in [0, 1). It drops by sample, as all dropout in a
            chain.
        targets: Names of linear layers, or suffixes of names after a dot: ``c_attn`` selects the layer in every block,
            ``h.0.attn.c_attn`` only the layer in the first block. None: all layers that can have an adapter.
        dora: Whether adapters also have a magnitude for each output (DoRA).
        modules_to_save: Names of modules, or suffixes as of targets, which are trained as a whole, without adapters. A
            weight that is tied to one of theirs is trained with it.

    Raises:
        ModelError: If a number is out of range, or a target does not exist or its adapter would be ignored, or there is
            no module to save of a name. The message lists the linear layers, or the modules.
    """
    if not isinstance(rank, int) or rank < 1 or not 0 <= dropout < 1:
        raise ModelError(
            f"model.lora.rank={rank} must be a whole number of at least 1, and model.lora.dropout={dropout} in [0, 1)"
        )
    whole = _parameters_of(chain, modules_to_save) if modules_to_save else set()
    refused = {name: why for name, why in _why_refused(chain).items() if f"{name}.weight" not in whole}
    possible = [name for name, why in refused.items() if not why]
    listed = ", ".join(sorted({name.rpartition(".")[2] for name in possible})) or "none"
    chosen = {target: [name for name in refused if f".{name}".endswith(f".{target}")] for target in targets or ()}
    for target, found in chosen.items():
        reasons = [f"{name} {refused[name]}" for name in found if refused[name]]
        if reasons or not found:
            outside = " outside of model.lora.modules_to_save" * bool(whole)
            why = reasons[0] if reasons else f"no layer{outside} has that name"
            raise ModelError(f"model.lora.targets={target}: {why}; those that can have one: {listed}")
    if not (wanted := set(possible if targets is None else sum(chosen.values(), []))):
        raise ModelError(f"model.lora.rank={rank}: no nn.Linear here can have an adapter; set it to null")
    builds: dict[tuple, Callable[[], nn.Module]] = {}  # so that layers with the same ``build`` still have the same

    def adapted(layer: LayerSpec) -> LayerSpec:
        names = [name for name in possible if is_within(f"{name}.", [layer.name])]
        inside = tuple((name[len(layer.name) + 1 :], name in wanted) for name in names)
        trained = tuple(name[len(layer.name) + 1 :] for name in sorted(whole) if is_within(name, [layer.name]))
        build = partial(_build, layer.build, inside, trained, (rank, alpha / rank, dropout, dora))
        return replace(layer, build=builds.setdefault((layer.build, inside, trained), build))

    initialise = chain.initialise
    return replace(
        chain,
        layers=[adapted(layer) for layer in chain.layers],
        initialise=None if initialise is None else partial(_initialise, initialise),
        base=chain,
    )


@torch.no_grad()
def merge(layers: nn.Module) -> None:
    """Add every adapter to its layer's weight in place, so that only the layers of the base are left."""
    for module in list(layers.modules()):
        if isinstance(module, LoRALinear):
            norms, magnitude = module.norms(), module.lora_magnitude_vector
            module.weight += module.scale * module.lora_B.weight @ module.lora_A.weight
            if magnitude is not None:
                module.weight.copy_(magnitude(module.weight.t(), *norms).t())
            del module.lora_A, module.lora_B, module.lora_dropout, module.lora_magnitude_vector
        if isinstance(module, FrozenLinear):
            module.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]  # typeshed wants a subclass


def _parameters_of(chain: Chain, names: Sequence[str]) -> set[str]:
    """Return the parameters of all modules with these names, or suffixes of names, and those that are tied to them."""
    parameters = dict(chain.skeleton().named_parameters(remove_duplicate=False))
    modules, owners = [name for name, _ in chain.skeleton().named_modules()], set()
    for given in names:
        chosen = [name for name in modules if f".{name}".endswith(f".{given}")]
        if not (found := {chain.canonical(name) for name in parameters if is_within(name, chosen)}):
            listed = ", ".join(sorted({name.split(".")[-2] for name in parameters}))
            raise ModelError(f"model.lora.modules_to_save={given}: no module with weights has that name; e.g. {listed}")
        owners |= found
    return {name for name in parameters if chain.canonical(name) in owners}


def _why_refused(chain: Chain) -> dict[str, str]:
    """Return {name of a module with a weight: the reason why it cannot have an adapter; "" if it can}."""
    modules = dict(chain.skeleton().named_modules())
    # torch's encoder layer and a fused head read the weights of these layers, but do not call the layers.
    uncalled = {part for m in modules.values() if isinstance(m, nn.TransformerEncoderLayer) for part in m.children()}
    uncalled |= {m.projection for m in modules.values() if isinstance(m, FusedHead)}
    tied = {*chain.tied, *chain.tied.values()}
    refused = {}
    for name, module in modules.items():
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            if type(module) is not nn.Linear:
                refused[name] = f"is a {type(module).__name__}, and only an nn.Linear can have one"
            elif f"{name}.weight" in tied:
                refused[name] = "has a tied weight, which an adapter would separate from the other"
            else:
                refused[name] = "is read by another layer and never called" if module in uncalled else ""
    return refused


def _build(
    build: Callable[[], nn.Module],
    inside: Sequence[tuple[str, bool]],
    trained: Sequence[str],
    adapter: tuple[int, float, float, bool],
) -> nn.Module:
    """Build a layer, freeze all but the parameters ``trained``, and change the linear layers ``inside``.

    These are given as (name, whether it gets an adapter), and an adapter as (rank, scale, dropout, whether it is DoRA).
    """
    layer, (rank, scale, dropout, dora) = build(), adapter
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name in trained)
    for name, has_adapter in inside:
        linear = layer.get_submodule(name)
        linear.__class__ = LoRALinear if has_adapter else FrozenLinear
        if isinstance(linear, LoRALinear):
            linear.scale, linear.lora_dropout = scale, nn.Dropout(dropout)
            linear.lora_A = Factor(linear.in_features, rank, bias=False)
            linear.lora_B = ZeroFactor(rank, linear.out_features, bias=False)
            linear.lora_magnitude_vector = Magnitude(linear.out_features) if dora else None
    return layer


def _initialise(base: Callable[[str, nn.Module], None], name: str, module: nn.Module) -> None:
    (reset_parameters if isinstance(module, (Factor, Magnitude)) else base)(name, module)
