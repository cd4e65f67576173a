"""The number of the step, for coefficients that follow it, such as that of a loss term (KL annealing)."""

import torch

_step = 1


def _read() -> int:
    return _step


def leave_uncompiled() -> None:
    """Let torch.compile read the step in each call. It would compile the code that reads it again for each step."""
    global _read
    _read = torch.compiler.disable(_read)  # pyright: ignore[reportAssignmentType]


def current_step() -> int:
    """Return the number of the step that a layer or a loss computes, from 1 on.

    The number is the same in every micro-batch, on every rank, and in recomputations. In an evaluation, and in
    everything that uses saved weights, it is the number of the step that has made the weights: 1 before any.
    """
    return _read()


def set_step(step: int) -> None:
    """Set the number of the step."""
    global _step
    _step = step
