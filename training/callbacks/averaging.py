"""Averages of the weights: exponential (EMA) and stochastic weight averaging (SWA)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from common.errors import TrainingError
from conf.schema import Root
from models.chain import Chain
from training.callbacks import Callback, build
from training.optimizer.kinds import mean_states


class Averaging(Callback):
    """The base of callbacks that average weights; ``training.optimizer.average`` has the tensors.

    Evaluations, checkpoints and all that is made of them use the average as soon as there is one.

    Attributes:
        kind: Its name in checkpoints.
        rule: Adds weights to an average in place: (averages, weights, number of weights in the averages).
        use_buffers: Whether floating-point buffers (BatchNorm's running statistics) are averaged too.
    """

    kind: str
    rule: Callable[[list[Tensor], list[Tensor], int], None]

    def __init__(self, every: int = 1, start: float = 1, use_buffers: bool = True) -> None:
        """Check the numbers.

        Args:
            every: The weights after each step that this number divides count.
            start: The first step whose weights may count; below 1, a fraction of the run's steps.
            use_buffers: See the class.

        Raises:
            TrainingError: A number is out of range.
        """
        if every < 1 or not 0 <= start < math.inf:
            what = f"callbacks.{self.kind}.every={every} must be at least 1, and start={start} a step"
            raise TrainingError(f"{what}, or a fraction of the run from 0 to 1")
        self.use_buffers, self._every, self._start = use_buffers, every, start

    def is_due(self, step: int, total: int) -> bool:
        """Return whether the weights after ``step`` of a run of ``total`` steps count."""
        return step % self._every == 0 and step >= (self._start if self._start >= 1 else self._start * total)


class SWA(Averaging):
    """Stochastic weight averaging: the mean of all weights that count, by torch's function."""

    kind, rule = "swa", staticmethod(get_swa_multi_avg_fn())


class EMA(Averaging):
    """An exponential moving average, by torch's function. ``decay`` is the weight of the former average, in [0, 1]."""

    kind = "ema"

    def __init__(self, decay: float = 0.999, every: int = 1, start: float = 1, use_buffers: bool = True) -> None:
        """See ``Averaging``."""
        super().__init__(every, start, use_buffers)
        if not 0 <= decay <= 1:
            raise TrainingError(f"callbacks.ema.decay={decay} must be from 0 to 1")
        self.rule = get_ema_multi_avg_fn(decay)


def averaging_of(section: Any) -> Averaging | None:
    """Return the callback in the section ``callbacks`` that averages weights; None without one.

    Raises:
        TrainingError: There are several.
    """
    found = build(section, Averaging)
    if len(found) > 1:
        raise TrainingError(f"callbacks.{' and callbacks.'.join(found)} average the weights: leave one of them out")
    return next(iter(found.values()), None)


def states_of_run(cfg: Root, chain: Chain) -> float:
    """Return the parameter-sized states per parameter of a run: the optimizer's, and an average of the weights."""
    return mean_states(cfg.optim, chain) + (averaging_of(cfg.callbacks) is not None)
