"""The user's code at four points of a run: after a step, an evaluation, a checkpoint, and at the end.

``callbacks=[early_stop,gradient_histogram]`` names options of conf/callback/; a configuration may also hold a list of
sections with a ``_target_``. ``early_stop`` and ``gradient_histogram`` are examples to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import TrainingError
from conf.instantiate import build as build_role
from conf.instantiate import target_of, to_dict
from conf.schema import Root

if TYPE_CHECKING:
    from parallel.strategy import Strategy


class Callback:
    """The methods that a callback may define. They do nothing here. A callback need not be a subclass.

    All ranks call every method in the same order, so a callback may communicate. ``on_step`` and ``on_evaluation`` get
    the record that is written to metrics.jsonl. Loss, metrics, rate and norm are the same on every rank; times are not.
    An exception ends the run with its traceback; a ``common.errors.UserError``, with its message. A callback
    cannot change which parameters are trained (``requires_grad``).
    """

    def on_step(self, run: TrainingRun, record: Mapping[str, Any]) -> None:
        """Called after an optimizer step. Parameters still have their gradients, averaged over replicas and clipped."""

    def on_evaluation(self, run: TrainingRun, record: Mapping[str, Any]) -> None:
        """Called after an evaluation of the validation split."""

    def on_checkpoint(self, run: TrainingRun, path: Path) -> None:
        """Called when a checkpoint is begun. The complete checkpoint appears at ``path``, maybe a few steps later."""

    def on_end(self, run: TrainingRun, summary: Mapping[str, Any]) -> None:
        """Called when a run has reached its end, with the content of summary.json."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints keep and that a resumed run continues from.

        A checkpoint keeps rank 0's state as JSON, and every rank gets this state back: keys become strings, tensors
        become lists, NaN and infinity become None.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that ``state_dict`` has returned."""


@dataclass
class TrainingRun:
    """The view of a run that a callback gets on its rank.

    Attributes:
        cfg: The configuration.
        run_dir: The run directory.
        strategy: This rank's share of the model: ``strategy.named_parameters()``, ``strategy.mesh``.
        record: Writes a record, which has a "step", to metrics.jsonl and the loggers; only rank 0's call counts.
        histogram: Passes (name, counts, edges, step) to loggers that show histograms; only rank 0's call counts.
        say: Prints a sentence on the console; only rank 0's call counts.
        evaluation: A digest of the validation data and the loss. Results with different digests cannot be compared.
        step: The last completed step.
        stop_reason: The reason why the run ends after this step; None while it continues.
    """

    cfg: Root
    run_dir: Path
    strategy: Strategy
    record: Callable[[dict[str, Any]], None]
    histogram: Callable[[str, Sequence[float], Sequence[float], int], None]
    say: Callable[[str], None]
    evaluation: str = ""
    step: int = 0
    stop_reason: str | None = None

    def stop(self, reason: str) -> None:
        """End the training after this step as if it were the last one: with evaluation, checkpoint and test.

        All ranks must call this. From ``on_checkpoint``, it takes effect after the next step.
        """
        self.stop_reason = reason


class Callbacks:
    """All callbacks of a run, in the order of the configuration.

    Attributes:
        run: The view of the run that each callback gets.
        all: The callbacks, by name.
    """

    def __init__(self, section: Any, run: TrainingRun) -> None:
        """Build the callbacks.

        Args:
            section: The section ``callbacks`` of the configuration.
            run: The view of the run that each callback gets.

        Raises:
            TrainingError: See ``build``.
        """
        self.run = run
        self.all = build(section)
        self._trained = [(name, p, p.requires_grad) for name, p in run.strategy.named_parameters()]

    def call(self, method: str, argument: Any) -> None:
        """Call ``method`` of each callback that has it; see ``Callback``.

        Raises:
            TrainingError: A callback has changed which parameters are trained.
        """
        for place, callback in self.all.items():
            if hasattr(callback, method):
                getattr(callback, method)(self.run, deepcopy(argument))  # a callback may change its argument
                changed = [name for name, parameter, trained in self._trained if parameter.requires_grad != trained]
                if changed and method != "on_end":
                    raise TrainingError(
                        f"step {self.run.step}: callbacks.{place} has changed requires_grad of {changed[0]}, and a run "
                        "decides that before its first step: set it in the model, or let train.unfreeze train modules "
                        "from a later step on, such as train.unfreeze={20: [layer4]}"
                    )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the callbacks that have ``load_state_dict``, by name; empty states are left out."""
        states = {
            name: callback.state_dict() for name, callback in self.all.items() if hasattr(callback, "load_state_dict")
        }
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from these states. A callback that the run did not have before keeps its initial state."""
        for name in states.keys() & self.all.keys():
            self.all[name].load_state_dict(states[name])


def build(section: Any, kind: type = object) -> dict[str, Any]:
    """Build the callbacks of class ``kind`` in the section ``callbacks``: a mapping by name, a list, or None.

    Raises:
        TrainingError: An entry is not a section with a ``_target_``, or its target has no method of a callback.
    """
    tree = to_dict({"callbacks": section})["callbacks"] or {}
    if isinstance(tree, list):
        tree = {str(place): callback for place, callback in enumerate(tree)}
    made = {}
    for name, callback in tree.items():
        target = target_of(place := f"callbacks.{name}", callback)
        if kind is object or (isinstance(target, type) and issubclass(target, kind)):
            made[name] = build_role(place, callback)
    return made
