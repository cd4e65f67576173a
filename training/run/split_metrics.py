"""Metrics of a whole split (``metrics=[...]``): classes of torchmetrics, and functions of outputs and targets.

Rank 0 gets the outputs of each global batch in the order of the data (``parallel.outputs``), and updates the objects.
So they give what they give on one device, and torchmetrics' own reduction over ranks is not used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import TrainingError
from common.packages import load_torchmetrics
from conf.instantiate import resolve, to_dict
from conf.messages import nearest
from models.chain import Tensors
from models.losses import IGNORED, ClassCrossEntropy, ElementwiseLoss, Several, TokenCrossEntropy, TorchCrossEntropy
from parallel.mesh import Mesh
from parallel.outputs import Taker

_SHOWN = 60  # characters of a result that is no number
_OWN = ("_target_", "name", "output")  # the keys of an entry that are no arguments


class Entry(NamedTuple):
    """An entry of ``metrics``.

    Attributes:
        name: The name of its number, without that of the split.
        target: The dotted name of a class or function; the name alone of a class of torchmetrics.
        arguments: The arguments of the class, or further arguments of the function.
        output: The position of the tensor to measure if a model returns several; None for the first.
    """

    name: str
    target: str
    arguments: dict[str, Any]
    output: int | None = None


def entries(metrics: Any) -> list[Entry]:
    """Return the entries of the key ``metrics``. Raises TrainingError."""
    if metrics is None:
        return []
    given = to_dict({"metrics": metrics})["metrics"]
    read = []
    for one in given if isinstance(given, list) else [given]:
        # Only a _target_ may name code: in a checkpoint's configuration these are checked.
        section: Any = {"_target_": one} if isinstance(one, str) and "." not in one else one
        if not isinstance(section, Mapping) or not isinstance(target := section.get("_target_"), str):
            raise TrainingError(
                f"metrics: {one} names nothing; write metrics=[MulticlassAUROC], a class of torchmetrics, or "
                "'metrics=[{_target_: mypackage.f}]', a function of (outputs, targets)"
            )
        name = section.get("name") or _snake_case(target.rpartition(".")[2])
        arguments = {key: value for key, value in section.items() if key not in _OWN}
        if name in [entry.name for entry in read]:
            raise TrainingError(f"metrics has {name} twice: name one of them, {{_target_: {target}, name: …}}")
        read.append(Entry(name, target, arguments, section.get("output")))
    return read


def _snake_case(name: str) -> str:
    """Return the name of a class or function as that of a number: MulticlassF1Score becomes f1_score."""
    name = re.sub(r"^(Binary|Multiclass|Multilabel)(?=.)", "", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def target_of(entry: Entry) -> Any:
    """Return the class or function of an entry. Raises TrainingError."""
    if "." in entry.target:
        return resolve(entry.target)
    torchmetrics = load_torchmetrics()
    items = {**vars(torchmetrics.classification), **vars(torchmetrics)}
    known = {name: item for name, item in items.items() if inspect.isclass(item)}
    if entry.target not in known:
        hint = nearest("metrics=[{}]", entry.target, list(known))
        raise TrainingError(f"metrics: torchmetrics has no class {entry.target}{hint}")
    return known[entry.target]


class Measured:
    """An entry during an evaluation, on rank 0."""

    def __init__(self, entry: Entry, loss: Any) -> None:
        self.entry, self.target, self.place = entry, target_of(entry), entry.output or 0
        self.loss = dict(enumerate(loss.losses.values())).get(self.place) if isinstance(loss, Several) else loss
        self.metric: Any = None
        self.rows: list[tuple[Tensors, Tensors]] = []

    def update(self, outputs: tuple[Tensor, ...], targets: Tensors) -> None:
        """Add a global batch. Of several targets, those of the measured output count."""
        is_class = inspect.isclass(self.target)
        if not is_class and self.entry.output is None and len(outputs) > 1:
            self.rows.append((outputs, targets))
            return
        if self.place not in range(max(len(outputs), len(targets) if isinstance(targets, tuple) else 1)):
            raise IndexError(f"there is no output {self.place}; they are counted from 0")
        output = outputs[self.place if len(outputs) > 1 else 0]  # several losses may share one
        targets = targets[self.place] if isinstance(targets, tuple) else targets
        if not is_class:
            self.rows.append((output, targets))
            return
        if self.target.__module__.startswith("torchmetrics.classification."):
            output, targets = self._as_classes(output, targets)
        if self.metric is None:
            self.metric = self._made(output, targets)
        self.metric.update(output, targets)

    def value(self) -> Any:
        """Return the result for all batches."""
        if self.metric is not None:
            return self.metric.compute()
        outputs, targets = zip(*self.rows, strict=True)
        return self.target(_joined(outputs), _joined(targets), **self.entry.arguments)

    @property
    def draws(self) -> bool:
        """Whether the object can draw its result. In torchmetrics, the function of the base class only raises."""
        return getattr(getattr(self.metric, "plot", None), "__qualname__", "Metric.plot") != "Metric.plot"

    def _as_classes(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return probabilities and whole numbers: torchmetrics would decide by each batch whether it gets logits."""
        if isinstance(self.loss, TokenCrossEntropy):  # tokens are samples
            output, targets = output.flatten(0, -2), targets.flatten()
        if isinstance(self.loss, (TokenCrossEntropy, ClassCrossEntropy, TorchCrossEntropy)):
            output = output.softmax(1)
            if targets.is_floating_point():  # probabilities of classes
                targets = targets.argmax(1)
        elif isinstance(self.loss, ElementwiseLoss) and isinstance(self.loss.terms, nn.BCEWithLogitsLoss):
            output = output.sigmoid()
        if self.target.__name__.startswith("Binary") and output.dim() == targets.dim() + 1 and output.shape[1] == 2:
            output = output[:, 1]
        if bool((targets != targets.long()).any()):
            raise ValueError("the targets are not whole numbers")
        return output, targets.long()

    def _made(self, output: Tensor, targets: Tensor) -> Any:
        """Return the object of a class, with what the outputs tell about arguments that are not given."""
        several = output.dim() > targets.dim()
        task = "multiclass" if several else "multilabel" if output[0].numel() > 1 else "binary"
        count = output.shape[1] if output.dim() > 1 else 2
        ignored = self.loss.terms.ignore_index if isinstance(self.loss, TorchCrossEntropy) else IGNORED
        known = {"task": task, "num_classes": count, "num_labels": count, "ignore_index": ignored}
        taken = inspect.signature(self.target).parameters
        metric = self.target(**{key: value for key, value in known.items() if key in taken} | self.entry.arguments)
        for part in metric.modules() if isinstance(metric, nn.Module) else ():
            setattr(part, "distributed_available_fn", lambda: False)  # noqa: B010  # only rank 0 has it
        return metric


def _joined(batches: Sequence[Any]) -> Tensors:
    several = isinstance(batches[0], tuple)
    return tuple(map(torch.cat, zip(*batches, strict=True))) if several else torch.cat([*batches])


class SplitMetrics(Taker):
    """The taker of an evaluation with metrics."""

    def __init__(self, metrics: Any, loss: Any) -> None:
        """Read the entries. ``loss`` is the chain's, which tells what the outputs are."""
        self._entries, self._loss, self.measured = entries(metrics), loss, []

    def take(self, selected: tuple[Tensor, ...], targets: Tensors) -> None:
        """See ``Taker``."""
        self.measured = self.measured or [Measured(entry, self._loss) for entry in self._entries]
        for one in self.measured:
            one.update(selected, targets)

    def results(self, mesh: Mesh, folder: Path, split: str) -> dict[str, float]:
        """Return the numbers by their names in metrics.jsonl, and draw tables and curves to ``folder``.

        All ranks call this together.
        """
        found: dict[str, float] = {}
        for one in self.measured:
            value, name = one.value(), f"{split}_{one.entry.name}"
            found |= (named := numbers(name, value, one.draws)) or {}
            if named is None:
                import matplotlib.pyplot as plt

                figure, _ = one.metric.plot(value)
                figure.savefig(folder / f"{name}.png")
                plt.close(figure)
        return mesh.gather(found)[0]


def numbers(name: str, value: Any, draws: bool = False) -> dict[str, float] | None:
    """Return a result as numbers: of a mapping or a vector several, by keys or places.

    If the metric draws what is no number, return None for tables and curves. Raises TrainingError for anything else.
    """
    if isinstance(value, Mapping):
        return {key: one for part, of in value.items() for key, one in (numbers(f"{name}_{part}", of) or {}).items()}
    if draws and (isinstance(value, (tuple, list)) or getattr(value, "ndim", 0) > 1):
        return None
    if getattr(value, "ndim", 0) == 1 and len(value) > 1:
        return {f"{name}_{i}": float(one) for i, one in enumerate(value)}
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError):
        said = " ".join(repr(value).split())
        raise TrainingError(
            f"metrics: {name} is {said if len(said) < _SHOWN else said[:_SHOWN] + '…'}, which is no number; let the "
            "metric return a number, a vector (a tensor or an array), or a dict of these"
        ) from None
