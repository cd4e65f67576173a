"""A chain from an existing module: the layers of an ``nn.Sequential``, or any other module as one layer."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ModelError
from models.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d, become
from models.chain import Chain, LayerSpec, aliases, check_parameters, dtype_of, keep_tensors, without_weights
from models.losses import loss_of

# torch's layers update their running statistics at every micro-batch, and each replica updates them differently.
_OURS = {nn.BatchNorm1d: BatchNorm1d, nn.BatchNorm2d: BatchNorm2d, nn.BatchNorm3d: BatchNorm3d}
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_CHANGES = ("_modules", "training")  # attributes that differ between instances of nn.Sequential


MODULE = "module"  # the layer's name if a module is the only layer


def chain_of(net: nn.Module, loss: Any, **fields: Any) -> Chain:
    """Make a chain that starts from the weights of ``net``. Training does not change ``net`` itself.

    The children of an ``nn.Sequential`` are the layers. A module with its own forward is one layer, ``module``, which
    is computed as a whole: strategies with stages cannot run it. An ``nn.Sequential`` with its own hooks, parameters or
    buffers is also one layer.

    Every process of a run holds all these weights once, in addition to the weights of its layers. Parameters that
    layers share are tied, frozen parameters stay frozen, and torch's BatchNorm is replaced by ``models.batchnorm``.
    Modules in eval mode stay in eval mode in training, unless all modules are in eval mode. Buffers keep their dtype if
    it is not the parameters' dtype, which the run replaces by train.precision.

        chain = chain_of(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), ClassCrossEntropy())

    Args:
        net: An ``nn.Sequential``, with children named "0", "1", ... unless they have other names; or any module.
        loss: A loss as in ``models.losses``, or a torch loss, such as ``nn.CrossEntropyLoss()``.
        **fields: Further fields of ``Chain``, such as ``limits={"vocabulary": 50257}``.

    Raises:
        ModelError: If ``net`` is not a module or ``loss`` is not a loss, or for a ``SyncBatchNorm``, a
            BatchNorm without weights or running statistics, a lazy module that has not been called yet, weights that
            are on the meta device or cannot be copied, ``get_extra_state()``, and parameters that are complex, have
            hooks, or are of two dtypes.
    """
    given = _as_sequential(net)
    check_parameters(given)
    try:
        source = copy.deepcopy(given).cpu()
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"this model cannot be copied: {error}. If it is pruned, or has weight_norm or spectral_norm, make that "
            "permanent first (prune.remove, remove_weight_norm), or use torch.nn.utils.parametrizations"
        ) from error
    _use_our_batchnorm(source)
    if not any(module.training for module in net.modules()):
        source.train()
    keep_tensors(source)
    dtype = dtype_of(source)
    fields.setdefault("channels_last", any(map(_is_channels_last, source.parameters())))
    names = [name for name, _ in source.named_modules(remove_duplicate=False) if name and "." not in name]
    return Chain(
        layers=[LayerSpec(name, partial(without_weights, source.get_submodule(name), dtype), True) for name in names],
        loss=loss,
        tied=aliases(source.named_parameters(remove_duplicate=False)),
        copied=aliases((f"{n}.{key}", b) for n in names for key, b in source.get_submodule(n).named_buffers()),
        initialise=partial(_copy_weights, source),
        fingerprint=_fingerprint(source),
        **fields,
    )


def chain_of_module(build: Callable[[], nn.Module], loss: Any) -> Chain:
    """Make a chain of one layer, ``module``. ``build`` constructs it from the run's seed."""
    return Chain([LayerSpec(MODULE, partial(_whole, build))], loss)


def names_of_module(weights: dict[str, Tensor], tied: dict[str, str], layers: Sequence[str]) -> dict[str, Tensor]:
    """Return a chain's weights for ``load_state_dict`` of the module from which the chain was made.

    Args:
        weights: The weights, by the chain's names.
        tied: {alias: canonical} names. The aliases are added to the weights.
        layers: The names of the chain's layers.
    """
    whole = {**weights, **{alias: weights[name] for alias, name in tied.items() if name in weights}}
    return {name.removeprefix(prefix_of(layers)): tensor for name, tensor in whole.items()}


def prefix_of(layers: Sequence[str]) -> str:
    """Return the prefix of a chain's names that is missing in the module's own names."""
    return f"{MODULE}." if list(layers) == [MODULE] else ""


def _whole(build: Callable[[], nn.Module]) -> nn.Module:
    return _use_our_batchnorm(_as_sequential(build(), whole=True)).get_submodule(MODULE)


def _as_sequential(net: Any, whole: bool = False) -> nn.Module:
    """Return ``net`` if it computes its children in order, otherwise a module with ``net`` as its only child."""
    if not isinstance(net, nn.Module) or isinstance(net, _WRAPPERS) or hasattr(net, "_orig_mod"):
        kind = f"the class {net.__name__}" if isinstance(net, type) else f"a {type(net).__name__}"
        raise ModelError(
            f"chain_of takes an nn.Module, not {kind}. Write nn.Sequential(*layers), or a Chain of layers "
            "(docs/own_model.md, 'A model'). parallel=ddp and train.compile=true wrap the model by themselves"
        )
    if _is_plain_sequential(net) and not whole and [*net._modules] != [MODULE]:
        return net
    if loss_of(net) is not None:
        raise ModelError(f"{type(net).__name__}.loss would be called in place of the given loss: rename this method")
    return nn.Sequential(OrderedDict({MODULE: net}))


def _is_plain_sequential(net: nn.Module) -> bool:
    """Return whether ``net`` only computes its children in order, without its own hooks and parameters."""
    own = vars(net)
    if isinstance(net, torch.jit.ScriptModule):
        return False
    inherits = all(
        getattr(type(net), name) is getattr(nn.Sequential, name) for name in ("forward", "__call__", "train")
    )
    unchanged = all(own.get(name) == value for name, value in vars(nn.Sequential()).items() if name not in _CHANGES)
    return inherits and unchanged and "forward" not in own


def _use_our_batchnorm(net: nn.Module) -> nn.Module:
    places = Counter(id(module) for _, module in net.named_modules(remove_duplicate=False))
    for name, module in list(net.named_modules()):
        if type(module) in _OURS:
            if (count := places[id(module)]) > 1:
                raise ModelError(f"layer {name!r}: the same BatchNorm stands at {count} places; make one for each")
            if not module.affine or not module.track_running_stats or module.momentum is None:
                kind = type(module).__name__
                raise ModelError(f"layer {name!r}: {kind} needs affine=True, track_running_stats=True and a momentum")
            become(module, _OURS[type(module)])
    return net


def _is_channels_last(weight: torch.Tensor) -> bool:
    return weight.dim() == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def _fingerprint(net: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _copy_weights(source: nn.Module, name: str, module: nn.Module) -> None:
    given = source.get_submodule(name)
    for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        # In the weight's own dtype, which may be wider than the dtype in which weights are drawn.
        tensor.data = getattr(given, key).detach().clone(memory_format=torch.contiguous_format)
