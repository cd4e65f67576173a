"""Checks the metrics of whole splits, and the numbers by which weights and runs are compared."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING

from common.errors import TrainingError, add_note
from models.chain import as_tuple
from parallel.examination import MOST_OUTPUTS, made_up
from training.reporting.monitor import LOSS, check_name, evaluated
from training.run.split_metrics import Measured, entries, numbers

if TYPE_CHECKING:
    from training.run.setup import Setup

_BATCHES = 4  # some metrics need several samples


def check_metrics(setup: Setup) -> None:
    """Try the metrics with made-up outputs and targets of the data. Raises TrainingError, or the error of a function.

    Then the names of their numbers are known, and ``train.monitor`` must be one of a run's numbers.
    """
    cfg, found = setup.cfg, setup.examination
    tried = [Measured(entry, setup.chain.loss) for entry in entries(cfg.metrics)]
    outputs = as_tuple(found.layers[-1].outputs[0]) if found.loss is not None and found.layers[-1].outputs else ()
    if not tried or not outputs or sum(tensor.numel() for tensor in outputs) > MOST_OUTPUTS:
        return
    names, targets = [], setup.some(setup.plan.microbatch_size).targets
    drawn = tuple(x.detach().float() if x.is_floating_point() else x for x in made_up(outputs))
    for one in tried:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(_BATCHES):
                    one.update(drawn, targets)
                names += numbers(one.entry.name, one.value(), one.draws) or {}
        except TrainingError:
            raise
        except Exception as error:  # of a user's code, or of torchmetrics
            if inspect.isclass(one.target):
                shapes = (" and ".join(str(list(x.shape)) for x in of) for of in (outputs, as_tuple(targets)))
                given = " with targets ".join(shapes)
                raise TrainingError(f"metrics: {one.entry.target} cannot take outputs {given}: {error}") from None
            if not isinstance(error, ValueError):
                add_note(error, f"raised in metrics: {one.entry.target}, tried on made-up outputs")
                raise
            return  # it may need other numbers than made-up ones
    mine, monitored = tuple(f"val_{one.entry.name}" for one in tried), cfg.train.monitor or LOSS
    if cfg.mode == "train" and monitored.startswith(mine):
        known = evaluated((*setup.chain.loss.metrics, *names), setup.of_tokens)
        check_name("train.monitor", monitored, known)
