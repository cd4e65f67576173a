"""Muon: the matrices that it updates, and an exact version of torch's."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.chain import Chain


def hidden_matrices(chain: Chain) -> set[str]:
    """Return the names of the trainable matrices of a model's hidden layers. Tied matrices have their canonical names.

    Embeddings, the output layer (the last module that directly has a matrix), and matrices that are tied to an
    embedding or to the output layer are left out.
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
    """torch's Muon with orthogonalization in the gradients' dtype.

    torch orthogonalizes in bfloat16. There, the last bit of a gradient moves the loss by 1e-4 within 20 steps.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update the parameters that have a gradient; there is no ``closure`` in training."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
                update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
                update = _orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-lr * _muon_factor(group["adjust_lr_fn"], *parameter.shape))


def _muon_factor(adjust: str | None, rows: int, columns: int) -> float:
    """Return the factor on the learning rate of a matrix, by ``adjust_lr_fn``."""
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _orthogonalized(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
