"""A chain: a model as an ordered list of named layers, each computed from the output of the previous layer.

A layer's output is a tensor or a flat tuple of tensors. A tuple lets a model pass on skip connections, a second input
or an auxiliary loss. A layer is called as ``layer(*tensors)`` with the output of the previous layer, and the first
layer with the batch's inputs, so ordinary modules work unchanged.

A contiguous run of layers is a *stage*. Layers have the same names in every stage, so the keys of a stage's
``state_dict`` are the whole model's keys, on every rank and in every layout.

    chain = gpt2(size="tiny")
    stage = chain.build(chain.names[3:7], seed=1337, device=torch.device("cpu"))

This builds four layers, with exactly the weights that they have if one device holds all layers.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from common.errors import ModelError, TrainingError
from models.cut import CutOf
from models.fused_cross_entropy import FusedHead
from models.huggingface import HuggingFace
from models.losses import Loss, TokenCrossEntropy, as_sums, check_is_loss, loss_of
from models.seeds import by_sample, derive_seed, seeded

_MOST_LAYERS = 10_000  # each layer takes several Python objects
CPU = torch.device("cpu")
ONE_LAYER = (
    "the model is one layer, which single, ddp, fsdp and hsdp run as it is; to cut it into stages, write its layers as "
    "an nn.Sequential or as a Chain (docs/own_model.md, 'A model'), without hooks and parameters beside the layers"
)
LOSS = ""  # the name of the chain's loss among the names of layers; no layer has this name
REFERENCE = "dpo_reference"  # the name, within a layer, of its frozen copy (``models.preference``)

Tensors = Tensor | tuple[Tensor, ...]  # the output of a layer
T = TypeVar("T")


def as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """Return a tensor as a tuple of one tensor, and a tuple unchanged."""
    return tensors if isinstance(tensors, tuple) else (tensors,)


def checked(name: str, layer: nn.Module, output: Tensors) -> tuple[Tensor, ...]:
    """Return a layer's output as a tuple; raise TypeError if it is neither a tensor nor a flat tuple of tensors."""
    tensors = as_tuple(output)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__ + (" in a tuple" if isinstance(output, tuple) else "")
            raise TypeError(
                f"layer {name!r} ({type(layer).__name__}) returned a {kind}; return a tensor or a flat tuple of tensors"
            )
    return tensors


def nest(module: nn.Module, name: str, inner: nn.Module) -> None:
    """Add a module under a name. Dots in the name become nesting."""
    *parents, last = name.split(".")
    for part in parents:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.add_module(last, inner)


class Layers(nn.Module):
    """Consecutive named layers. Dots in names become nesting, so that keys read ``h.0.attn.c_attn.weight``."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.names = [name for name, _ in layers]
        for name, layer in layers:
            nest(self, name, layer)

    def __getitem__(self, name: str) -> nn.Module:
        return self.get_submodule(name)

    def items(self) -> list[tuple[str, nn.Module]]:
        """Return (name, layer), first to last."""
        return [(name, self[name]) for name in self.names]

    def forward(self, *tensors: Tensor) -> Tensors:
        """Compute all layers in order, without the loss, from the batch's inputs or the previous layer's output."""
        output: Tensors = tensors
        for _, layer in self.items():
            output = layer(*as_tuple(output))
        return output

    def tie(self, tied: Mapping[str, str]) -> None:
        """Make each alias of {alias: original} the same Parameter as the original, if both are among these layers."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for alias, original in tied.items():
            if alias in parameters and original in parameters:
                module, _, attribute = alias.rpartition(".")
                setattr(self.get_submodule(module), attribute, parameters[original])


def aliases(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return {alias: first name} of the tensors, parameters or buffers, that have several names."""
    first: dict[Tensor, str] = {}
    return {name: first[tensor] for name, tensor in named if first.setdefault(tensor, name) != name}


def check_sizes(dropout: float = 0.0, **sizes: int) -> None:
    """Check a model's sizes before the model is made. Raises ValueError, which names the key."""
    for key, value in sizes.items():
        if value < 1 or (key == "n_layer" and value > _MOST_LAYERS):
            most = f" and at most {_MOST_LAYERS:,}" if key == "n_layer" else ""
            raise ValueError(f"model.{key}={value} must be at least 1{most}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"model.dropout={dropout} must lie in [0, 1)")


def check_width(key: str, width: int, n_head: int, even: bool = False) -> None:
    """Check that a width divides into equal heads and, with ``even``, into pairs. Raises ValueError."""
    step = math.lcm(2, n_head) if even else n_head
    if width % step:
        heads = f"model.n_head={n_head} equal heads{' and into pairs' if even else ''}"
        nearest = max(1, round(width / step)) * step
        raise ValueError(f"model.{key}={width} does not divide into {heads}; the nearest width that does is {nearest}")


@dataclass(frozen=True)
class LayerSpec:
    """A layer that is not built yet.

    Attributes:
        name: The name, which may contain dots (``h.0``).
        build: A function that makes the module on the current device. Shapes are inferred only once for layers with the
            same ``build``, such as the blocks of a transformer.
        keeps_eval: Whether a layer that is made in eval mode as a whole stays in eval mode in training.
    """

    name: str
    build: Callable[[], nn.Module]
    keeps_eval: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not all(self.name.split(".")):
            raise ModelError(f"layer {self.name!r}: a name is a text such as 'h.0', without empty parts")
        if isinstance(self.build, nn.Module) or not callable(self.build):
            raise ModelError(
                f"layer {self.name!r}: build={type(self.build).__name__} must be a function that makes the layer, such "
                "as functools.partial(nn.Linear, 4, 2); layers that exist become a chain by models.sequential.chain_of"
            )

    def made(self) -> nn.Module:
        """Build the layer on the meta device, with dropout by sample, in training mode except for parts in eval mode.

        Raises ModelError if the result is not a module.
        """
        with torch.device("meta"):
            try:
                layer = self.build()
            except Exception as error:
                if "meta" not in str(error).lower():
                    raise
                layer = without_weights(self._template)  # it reads numbers: ``.item()``, an ``if``, numpy
        if not isinstance(layer, nn.Module):
            kind = type(layer).__name__
            raise ModelError(f"layer {self.name!r}: build() returned a {kind}; it must return an nn.Module")
        check_parameters(layer, self.name)
        keep_tensors(layer)
        modes = [(module, module.training) for module in layer.modules()]
        by_sample(self.name, layer).train()
        if self.keeps_eval or any(training for _, training in modes):
            for module, training in modes:
                module.training &= training
        return layer

    def constructed(self, seed: int) -> nn.Module:
        """Build the layer on the CPU. Its constructor draws the numbers from ``seed``."""
        with seeded(derive_seed(seed, self.name)), torch.device("cpu"):
            return self.build()

    @cached_property
    def _template(self) -> nn.Module:
        return without_weights(self.constructed(0))


def check_parameters(module: nn.Module, prefix: str = "") -> None:
    """Raise ModelError for properties of a module that its trained copy, or a checkpoint, would not have."""
    for name, layer in module.named_modules(prefix=prefix):
        kind = type(layer).__name__
        if isinstance(layer, torch.jit.ScriptModule):
            raise ModelError(
                f"layer {name!r} is compiled by TorchScript, and cannot be built again on other devices: give the "
                "nn.Module that it was made from (train.compile=true compiles it)"
            )
        if isinstance(layer, nn.SyncBatchNorm):
            raise ModelError(f"layer {name!r} is a SyncBatchNorm: use a BatchNorm, and parallel.sync_batchnorm=true")
        if any(map(is_lazy, own_tensors(layer).values())):
            raise ModelError(f"layer {name!r} ({kind}) is lazy: call the model once before")
        if type(layer).get_extra_state is not nn.Module.get_extra_state:
            raise ModelError(
                f"layer {name!r} ({kind}) has get_extra_state(), and checkpoints contain parameters and buffers only: "
                "keep this state as a buffer (register_buffer)"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            which = f"embedding {name or kind}"
            if layer.sparse:
                raise ModelError(f"{which} has sparse gradients; leave sparse=True out")
            if layer.scale_grad_by_freq:
                raise ModelError(
                    f"{which} divides gradients by how often a word occurs in a micro-batch, which depends on the "
                    "layout; leave scale_grad_by_freq=True out"
                )
    for name, tensor in (*module.named_parameters(prefix), *module.named_buffers(prefix)):
        if "/" in name:
            raise ModelError(f"{name}: a checkpoint has the optimizer's tensors after a slash; rename the module")
        if type(tensor.data) is not Tensor:
            raise ModelError(
                f"{name} is a {type(tensor.data).__name__}, and a run would make an ordinary tensor of it: give the "
                "model before it is quantized or distributed"
            )
    at: dict[tuple[int, int], tuple[str, bool]] = {}  # the first parameter at each place in memory
    kinds: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters(prefix):
        if parameter.is_floating_point() and kinds.setdefault(parameter.dtype, name) == name and len(kinds) > 1:
            first, second = (f"{at} is {str(dtype).removeprefix('torch.')}" for dtype, at in kinds.items())
            raise ModelError(
                f"parameter {first} and {second}, but a run computes with parameters of one dtype: convert the model "
                "(net.float()); train.precision=bf16 computes in both"
            )
        if parameter.numel() == 0:
            continue
        place, trained = (parameter.untyped_storage()._cdata, int(parameter.storage_offset())), parameter.requires_grad
        other, other_trained = at.setdefault(place, (name, trained))
        if other != name and (trained or other_trained):
            raise ModelError(
                f"the parameters {other} and {name} share their memory, and a run copies each: to tie modules, assign "
                "a.weight = b.weight, not a.weight.data = b.weight.data, and again after load_state_dict(assign=True)"
            )
        if parameter.is_complex():
            raise ModelError(
                f"parameter {name} is complex, and optimizers and norms take real ones: make it "
                "nn.Parameter(torch.view_as_real(weight)), and use torch.view_as_complex of it in the forward"
            )
        # torch has no public way to ask (private in 2.13).
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ModelError(
                f"parameter {name} has a hook for its gradient, and the run trains a copy without it. Freeze the "
                "parameter (requires_grad_(False)), or change the gradient in the layer's forward: "
                "torch.where(mask, weight, weight.detach()) trains a part of a weight"
            )


def keep_tensors(layer: nn.Module) -> None:
    """Turn tensors that are plain attributes of modules into buffers, so that they move with their modules."""
    for module in layer.modules():
        for key in [key for key, value in vars(module).items() if isinstance(value, Tensor)]:
            module.register_buffer(key, vars(module).pop(key), persistent=False)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of a module's floating-point parameters; float32 if it has none."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def without_weights(layer: nn.Module, usual: torch.dtype | None = None, dtype: torch.dtype | None = None) -> nn.Module:
    """Return a copy of ``layer`` on the current default device, with uninitialized memory.

    Parameters, and buffers of the ``usual`` dtype, get ``dtype``. By default ``usual`` is the dtype of the parameters,
    and ``dtype`` is the default dtype.
    """
    empty: dict[int, Any] = {}
    usual = usual or dtype_of(layer)
    for parameter in layer.parameters():
        empty[id(parameter)] = nn.Parameter(_empty_like(parameter, parameter.dtype, dtype), parameter.requires_grad)
    for buffer in layer.buffers():
        empty[id(buffer)] = _empty_like(buffer, usual, dtype)
    return copy.deepcopy(layer, empty)  # deepcopy treats the entries of the memo as copies that it has made already


def _empty_like(tensor: Tensor, usual: torch.dtype, dtype: torch.dtype | None) -> Tensor:
    follows = tensor.is_floating_point() and tensor.dtype in (usual, torch.float32)
    return torch.empty(tensor.shape, dtype=dtype if follows else tensor.dtype)


def reset_parameters(name: str, module: nn.Module) -> None:
    """Initialize a module by ``reset_parameters()``. Without this method it keeps its constructor's numbers."""
    getattr(module, "reset_parameters", lambda: None)()


def draw_normal(name: str, module: nn.Module, *, std: float) -> None:
    """Set a module's initial weights: Normal(0, std), zero biases, norms of one."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        module.reset_parameters()
        return
    module.get_parameter("weight").normal_(0.0, std)
    if (bias := getattr(module, "bias", None)) is not None:
        bias.zero_()


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and buffers by name, without those of its submodules."""
    return dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))


_NO_LAYERS = Layers([])


def _with_terms(build: Callable[[], FusedHead], loss: TokenCrossEntropy) -> FusedHead:
    head = build()
    head.terms = loss
    return head


@dataclass(frozen=True)
class Chain:
    """A model that is not built yet.

    Attributes:
        layers: The layers in the order of computation. The first layer takes the batch's inputs.
        loss: (output of the last layer, targets, weights) -> Sums, or a torch loss (``models.losses.as_sums``). If the
            last layer has a method ``loss(*tensors, targets, weights)``, training calls this method instead, with the
            layer's *input* (a fused linear + cross entropy needs no logits). If the layer has an attribute
            ``step_cache``, it is set to an empty dict for each step and to None after the step.
        tied: {alias: canonical} names of parameters that are tied.
        initialise: (full module name, module) -> None. Called once for every submodule that itself holds parameters or
            buffers, under a seed made from the module's name, so that no module's numbers depend on another module's.
            If a submodule has no ``reset_parameters()`` (``nn.MultiheadAttention``), its layer is first constructed
            under a seed made from the layer's name. If None, each layer keeps the numbers that its constructor draws
            under that seed.
        limits: The limits of the model on its inputs, such as {"positions": 1024, "vocabulary": 50304}.
        channels_last: Whether images are computed faster with the channels innermost in memory.
        embedding: The name of the token embedding's weight, if the vocabulary can grow (``model.extra_tokens``).
        continues: Whether a text can be continued with a ``models.attention.KeyValueCache``. Every layer that reads
            other tokens or positions must use the cache.
        hugging_face: Hugging Face's file format of the model, if there is one (``models.huggingface``).
        fingerprint: The fingerprint of the weights, if the chain contains weights instead of drawing them from the
            run's seed. It must be equal on all ranks.
        base: The chain whose layers are frozen and have adapters in this chain (``models.lora``).
        cut: The cuts of layers among ranks, by patterns of module names (``models.cut``); empty if the layers cannot be
            cut.
        copied: {alias: first name} of the buffers that layers share in the given module. Each layer has a copy.
        prove: A function that raises ModelError if the layers do not compute the same as the model from which they were
            made. Called once before a run. None if there is no such model.
        prove_parts: A function that raises ModelError if the layers do not compute the same for parts of sequences
            (``models.sequence``); with ``packed=True``, for documents that share a row. None if no model is to be
            compared with.
    """

    layers: Sequence[LayerSpec]
    loss: Loss
    tied: Mapping[str, str] = field(default_factory=dict)
    initialise: Callable[[str, nn.Module], None] | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    channels_last: bool = False
    embedding: str | None = None
    continues: bool = False
    hugging_face: HuggingFace | None = None
    fingerprint: str = ""
    base: Chain | None = None
    cut: Mapping[str, CutOf] = field(default_factory=dict)
    copied: Mapping[str, str] = field(default_factory=dict)
    prove: Callable[[], None] | None = None
    prove_parts: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        for layer in self.layers if isinstance(self.layers, Sequence) else [self.layers]:
            if not isinstance(layer, LayerSpec):
                raise ModelError(
                    f"a chain is made of a list of LayerSpec(name, build), not of a {type(layer).__name__}; layers "
                    "that exist become a chain by models.sequential.chain_of(nn.Sequential(...), loss)"
                )
        object.__setattr__(self, "loss", as_sums(self.loss))
        check_is_loss(self.loss)
        if not (names := self.names):
            raise ModelError("a chain needs at least one layer")
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ModelError(f"layer names must differ; more than once: {sorted(repeated)}")
        for name in names:
            if outer := [above for above in accumulate(name.split(".")[:-1], "{}.{}".format) if above in names]:
                raise ModelError(f"layer {name!r} would be a part of layer {outer[0]!r}: give one of them another name")
            if hasattr(_NO_LAYERS, name.partition(".")[0]):
                raise ModelError(f"layer {name!r} has the name of an attribute of modules: choose another")

    @property
    def names(self) -> list[str]:
        """Layer names, first to last."""
        return [layer.name for layer in self.layers]

    def with_loss(self, loss: Loss) -> Chain:
        """Return this chain with another loss. Raise TrainingError if the last layer computes a loss of its own."""
        *layers, last = self.layers
        head = self.skeleton([last.name])[last.name]
        if type(loss) is TokenCrossEntropy and isinstance(head, FusedHead):
            last = replace(last, build=partial(_with_terms, last.build, loss))
        elif loss_of(head) is not None:
            raise TrainingError(
                f"model.loss: the last layer of this model, {last.name}, computes the loss together with the logits; "
                "leave model.loss out, or write a model without a loss in its last layer"
            )
        return replace(self, layers=[*layers, last], loss=loss)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for pickling, without the fields that can be built from others."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def _whole(self) -> Layers:
        return self.skeleton(self.names)

    def skeleton(self, names: Sequence[str] | None = None) -> Layers:
        """Build layers on the meta device, without memory. Raise ValueError for unknown names.

        By default, return all layers. They are built only once, and every caller gets the same object: do not change
        them.
        """
        if names is None:
            return self._whole
        if unknown := set(names) - set(self.names):
            raise ValueError(f"no such layers: {sorted(unknown)}; this chain has {self.names}")
        layers = Layers([(layer.name, layer.made()) for layer in self.layers if layer.name in names])
        layers.tie(self.tied)
        return layers

    def build(
        self,
        names: Sequence[str],
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        built: Callable[[str, nn.Module], None] = lambda name, layer: None,
    ) -> Layers:
        """Build layers with their initial weights.

        If the owner of a tied weight is in another stage, the weight is drawn again, together with the owner's layer::

            stage 0                        stage 1
            embedding.wte.weight  ------>  head.lm_head.weight
            the owner: drawn from          a copy: of an embedding that is built here, too, temporarily,
            (seed, "embedding.wte")        from the same (seed, "embedding.wte")

        If both are in one stage, the alias becomes the owner's parameter. Other layers take no memory. Weights are
        drawn on the CPU in float32 for every device and every dtype of floating-point weights, so all runs start from
        the same numbers.

        ``built`` is called with each layer's name and the layer, before memory for the next layer is allocated. A
        weight that the layer shares with another of these layers is not final at that time.
        """
        layers = self.skeleton(names)
        for layer_name, layer in layers.items():
            constructed, usual = self._constructed(layer_name, layer, seed), (torch.float32, dtype_of(layer))
            for name, module in layer.named_modules(prefix=layer_name):
                owners = [self.tied.get(f"{name}.{key}", "") for key in own_tensors(module)]
                if not all(is_within(owner, names) for owner in owners):  # otherwise all its tensors are aliases
                    kept = {key for key, buffer in module.named_buffers(recurse=False) if buffer.dtype not in usual}
                    source = source_of(name)
                    self._fill(source, module, constructed, derive_seed(seed, source))
                    _move(module, device, dtype, kept)
            for alias, owner in self.tied.items():
                if is_within(alias, [layer_name]) and not is_within(owner, names):
                    owner_layer = [name for name in self.names if is_within(owner, [name])]
                    copy = layers.get_parameter(alias)
                    initial = self.build(owner_layer, seed, CPU, dtype).get_parameter(owner)
                    with torch.no_grad():
                        copy.copy_(initial).requires_grad_(initial.requires_grad)
            if inside := self._tied_inside(layer_name):
                layers.tie(inside)
            built(layer_name, layer)
        layers.tie(self.tied)  # the owners have memory now, which their aliases share
        return layers

    def walk(self, tensors: tuple[Tensor, ...], compute: Callable[[LayerSpec, tuple], tuple[T, tuple]]) -> Iterator[T]:
        """Yield a result of ``compute`` for each layer, from the first layer's inputs to the loss.

        ``compute(layer, tensors)`` returns the result and the tensors that the layer passes on. It is called once for
        layers with the same ``build`` and inputs of the same kind, such as a transformer's blocks. The last layer is
        always computed separately, because it computes the loss.
        """
        alike: dict[tuple, tuple[T, tuple]] = {}
        for layer in self.layers:
            kinds = ((t.shape, t.dtype, t.requires_grad, t.stride()) for t in tensors)
            key = layer.build, layer is self.layers[-1], *kinds
            if key not in alike:
                alike[key] = compute(layer, tensors)
            found, tensors = alike[key]
            yield found

    def tied_within(self, names: Sequence[str]) -> list[str]:
        """Return the names, aliases and originals, of the parameters that several of these layers share."""
        inside = {alias for name in names for alias in self._tied_inside(name)}
        pairs = [pair for pair in self.tied.items() if all(is_within(name, names) for name in pair)]
        return sorted({name for pair in pairs if pair[0] not in inside for name in pair})

    def _tied_inside(self, layer: str) -> dict[str, str]:
        """Return {alias: original} of the parameters that are tied within a layer."""
        return {pair[0]: pair[1] for pair in self.tied.items() if all(is_within(name, [layer]) for name in pair)}

    def _constructed(self, name: str, layer: nn.Module, seed: int) -> dict[str, nn.Module]:
        """Return a layer's modules by name, on the CPU, if only its constructor sets their numbers; else {}."""
        with_tensors = [module for module in layer.modules() if own_tensors(module)]
        if self.initialise is not None and all(hasattr(module, "reset_parameters") for module in with_tensors):
            return {}
        spec = next(spec for spec in self.layers if spec.name == name)
        return dict(spec.constructed(seed).named_modules(prefix=name))

    def _fill(self, name: str, module: nn.Module, constructed: Mapping[str, nn.Module], seed: int) -> None:
        """Give a module of the skeleton memory on the CPU and its initial numbers."""
        module.to_empty(device="cpu", recurse=False)
        with seeded(seed), torch.no_grad():
            if constructed:
                for key, tensor in own_tensors(module).items():
                    tensor.copy_(getattr(constructed[name], key))
            if self.initialise is not None:
                self.initialise(name, module)

    @cached_property
    def unsaved(self) -> frozenset[str]:
        """The names of what no checkpoint contains, as it is read or drawn again: frozen ``base``, and references."""
        layers = _NO_LAYERS if self.base is None else self.base.skeleton()
        base, state = dict(layers.named_parameters(remove_duplicate=False)), self.skeleton().state_dict(keep_vars=True)
        frozen = (name for name, tensor in state.items() if name in base and not tensor.requires_grad)
        return frozenset([*frozen, *(name for name in state if source_of(name) != name)])

    def canonical(self, name: str) -> str:
        """Return a parameter's name in files. For a tied parameter, this is the canonical name."""
        return self.tied.get(name, name)


def converted(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """Return tensors with floating-point tensors converted to ``dtype``. None leaves all tensors unchanged."""
    if dtype is None:
        return tensors
    new = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in as_tuple(tensors))
    return new if isinstance(tensors, tuple) else new[0]


def source_of(name: str) -> str:
    """Return the name whose initial numbers a module or a parameter has: its own, or for a reference the layer's."""
    return name.replace(f".{REFERENCE}", "")


def is_within(parameter: str, layers: Sequence[str]) -> bool:
    """Return whether the parameter with this full name belongs to one of the layers."""
    return any(parameter.startswith(f"{layer}.") for layer in layers)


def _move(module: nn.Module, device: torch.device, dtype: torch.dtype, kept: set[str]) -> None:
    """Move this module's own tensors to ``device`` and floating-point ones to ``dtype``. Children's tensors stay.

    The buffers in ``kept`` keep their dtypes.
    """
    for key, tensor in own_tensors(module).items():
        if tensor.is_floating_point() and key not in kept:
            tensor.data = tensor.data.to(dtype)
    module._apply(lambda tensor: tensor.to(device), recurse=False)
