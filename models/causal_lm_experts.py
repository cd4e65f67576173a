"""A computation of the experts of transformers' models, one expert after the other."""

from __future__ import annotations

from torch import Tensor, compiler, nn

NAME = "one_by_one"


def experts(self: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute the output of each token's ``chosen`` experts, as the model's own code does.

    The shapes in the model's code depend on the chosen experts. Tensors without values and compiled graphs need fixed
    shapes. For them, one batched product copies the weights of each token's experts.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # private: torch 2.13
    from transformers.integrations.moe import batched_mm_experts_forward

    if compiler.is_compiling() or hidden.is_meta or isinstance(hidden, FakeTensor):
        return batched_mm_experts_forward(self, hidden, chosen, weights)
    return type(self).forward.__wrapped__(self, hidden, chosen, weights)  # the library's wrapper calls this function


def register() -> None:
    """Make ``NAME`` a value of a configuration's experts_implementation."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
