"""Muon: the matrices that it updates, and an exact version of torch's."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import _muon

from models.chain import Chain


def hidden_matrices(chain: Chain) -> set[str]:
    """Return the names of the trainable matrices of a model's hidden layers. Tied ones have their canonical names.

    The matrices that are left out are embeddings, the model's output layer, which is the last module that has a matrix
    itself, and those tied to them.
    """
    outer, found = {chain.embedding}, []
    for layer_name, layer in chain.skeleton().items():
        for name, module in layer.named_modules(prefix=layer_name):
            own = module.named_parameters(name, recurse=False)
            if "norm" in type(module).__name__.lower() and not isinstance(module, nn.Linear):
                continue  # its scale may have several dimensions
            own = [(key, p) for key, p in own if p.dim() == 2 and not key.endswith("bias")]
            matrices = {chain.canonical(key): p.requires_grad for key, p in own}
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                outer.update(matrices)
            if matrices:
                found.append(matrices)
    outer.update(*found[-1:])
    return {name for matrices in found for name, trained in matrices.items() if trained} - outer


class ExactMuon(torch.optim.Muon):
    """torch's Muon, except that it orthogonalises in the gradients' dtype.

    In torch's bfloat16, the last bit of a gradient moves the loss by 1e-4 within 20 steps.
    """

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient."""
        with patch.object(_muon, "_zeropower_via_newtonschulz", _orthogonalised):
            return super().step(closure)


def _orthogonalised(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return what torch's function of Muon does, without its cast to bfloat16."""
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
