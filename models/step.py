"""The number of the step, for coefficients that follow it, such as that of a loss term (KL annealing)."""

_step = 1


def current_step() -> int:
    """Return the number of the step that a layer or a loss computes, from 1 on.

    The number is the same in every micro-batch, on every rank, and in recomputations. In an evaluation, and in
    everything that uses saved weights, it is the number of the step that has made the weights: 1 before any.
    """
    return _step


def set_step(step: int) -> None:
    """Set the number of the step."""
    global _step
    _step = step
