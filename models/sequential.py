"""A chain from an existing ``nn.Sequential``, with its layers, its names and its weights."""

from __future__ import annotations

import copy
import hashlib
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from common.errors import ModelError
from models.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d, StepBatchNorm
from models.chain import Chain, LayerSpec, without_weights
from models.losses import Loss

# torch's layers update their running statistics with every micro-batch, and differently in each replica.
_OURS = {nn.BatchNorm1d: BatchNorm1d, nn.BatchNorm2d: BatchNorm2d, nn.BatchNorm3d: BatchNorm3d}


def chain_of(net: nn.Sequential, loss: Loss, **fields: Any) -> Chain:
    """Make a chain that starts from the weights of ``net``; ``net`` itself is not changed by training.

    Every process of a run holds all these weights once, in addition to those of its layers. Parameters that layers
    share are tied, frozen parameters stay frozen, and torch's BatchNorm becomes that of ``models.batchnorm``.

        chain = chain_of(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), ClassCrossEntropy())

    Args:
        net: Its children are the layers, in order and by their names ("0", "1", ... unless they have others).
        loss: See ``models.losses``.
        **fields: Further fields of ``Chain``, such as ``limits={"vocabulary": 50257}``.

    Raises:
        ModelError: If ``net`` is not an ``nn.Sequential`` or ``loss`` is not a loss, or for a ``SyncBatchNorm``, a
            BatchNorm without weights or running statistics, a lazy module that has not been called yet, and weights
            that are on the meta device or cannot be copied.
    """
    _check_sequential(net)
    try:
        source = copy.deepcopy(net).cpu()
    except (TypeError, RuntimeError) as error:
        raise ModelError(f"this model cannot be copied: {error}") from error
    for name, module in list(source.named_modules()):
        if isinstance(module, nn.SyncBatchNorm):
            raise ModelError(f"layer {name!r} is a SyncBatchNorm: use a BatchNorm, and parallel.sync_batchnorm=true")
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            raise ModelError(f"layer {name!r} ({type(module).__name__}) is lazy: call the model once before")
        if type(module) in _OURS:
            source.set_submodule(name, _as_ours(name, module))
    names = [name for name, _ in source.named_modules(remove_duplicate=False) if name and "." not in name]
    first: dict[nn.Parameter, str] = {}
    shared = {
        name: first[parameter]
        for name, parameter in source.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    }
    return Chain(
        layers=[LayerSpec(name, partial(without_weights, source.get_submodule(name))) for name in names],
        loss=loss,
        tied=shared,
        initialise=partial(_copy_weights, source),
        fingerprint=_fingerprint(source),
        **fields,
    )


def _check_sequential(net: Any) -> None:
    """Check that ``net`` computes its children in their order."""
    if not isinstance(net, nn.Sequential) or type(net).forward is not nn.Sequential.forward:
        given = f"the class {net.__name__}" if isinstance(net, type) else f"a {type(net).__name__}"
        raise ModelError(
            f"chain_of takes an nn.Sequential, not {given}, whose forward may not compute its children one after the "
            "other. Write nn.Sequential(*layers), or a Chain of layers (docs/extending.md, 'A model'). parallel=ddp "
            "and train.compile=true wrap the model by themselves"
        )


def _as_ours(name: str, norm: nn.Module) -> StepBatchNorm:
    kind = type(norm)
    if not norm.affine or not norm.track_running_stats or norm.momentum is None:
        raise ModelError(f"layer {name!r}: {kind.__name__} needs affine=True, track_running_stats=True and a momentum")
    ours = _OURS[kind](norm.num_features, norm.eps, norm.momentum)
    ours.load_state_dict(norm.state_dict())
    for parameter, original in zip(ours.parameters(), norm.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    return ours


def _fingerprint(net: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _copy_weights(source: nn.Module, name: str, module: nn.Module) -> None:
    given = source.get_submodule(name)
    for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        tensor.copy_(getattr(given, key))
