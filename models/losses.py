"""Losses as sums and counts.

A loss returns ``Sums``: the sum over its terms, and their number. The mean is computed once, over the global batch.
Unlike a mean of means, it is also correct with padding, token budgets and a short last evaluation batch.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ModelError

IGNORED = -100  # torch's own ignore_index
# Names that metrics cannot have, because a step's record in metrics.jsonl has them.
_RECORDED = {
    "step", "loss", "lr", "grad_norm", "step_time_s", "samples_per_s", "tokens_per_s", "skipped", "mfu",
    "auxiliary_loss",
}  # fmt: skip


# The losses of these modules are sums over samples, without the samples of weight 0.
_BY_SAMPLE = (__name__, "models.fused_cross_entropy", "models.preference")


@dataclass
class Replicas:
    """The state of ``gather`` in this process. A step sets it.

    Attributes:
        gather: A function that returns the rows of all replicas; None if there is one replica.
        filled: For a filled-up micro-batch of an evaluation: the number of samples that count, and of all samples.
        called: Whether ``gather`` was called.
    """

    gather: Callable[[Tensor], Tensor] | None = None
    filled: tuple[int, int] | None = None
    called: bool = False


replicas = Replicas()


def gather(features: Any) -> Any:
    """Return the rows of all replicas, in the order of the global batch, for a loss or a layer that compares samples.

    The gradient of a replica's rows is the sum of the gradients from all replicas. If a loss computes the value of the
    whole batch on each replica and returns its ``Sums``, it trains as in one process. All replicas must call this
    function equally often. Samples that fill up the last batch of an evaluation are left out.

    Args:
        features: A tensor [b, ...], or a tuple of tensors of this shape.

    Returns:
        [global batch, ...] of each tensor; in one process the argument itself.

    Raises:
        PlanError: If the layout divides a replica's samples among micro-batches (``parallel.chunks`` above 1).
    """
    if isinstance(features, tuple):
        return tuple(map(gather, features))
    replicas.called = True
    if replicas.filled is not None:
        counted, whole = replicas.filled
        features = features[: len(features) * counted // whole]
    return features if replicas.gather is None else replicas.gather(features)


class Sums(NamedTuple):
    """The result of a loss for one micro-batch.

    Attributes:
        loss: Scalar, summed over the terms.
        count: Scalar, the number of terms.
        metrics: One scalar for each name in the loss's ``metrics``, summed over the same terms.
    """

    loss: Tensor
    count: Tensor
    metrics: tuple[Tensor, ...] = ()

    def stack(self) -> Tensor:
        """Return [loss, count, *metrics], detached, as one vector of float64 (float32 on MPS, which has no float64)."""
        return torch.stack([v.detach().to(_wide(self.loss)) for v in (self.loss, self.count, *self.metrics)])


class Loss(Protocol):
    """The loss at the end of a chain.

    One of several losses (``Several``) also has a method ``count(targets)``, which returns ``Sums.count`` of a training
    step, a scalar, before the output exists.

    Attributes:
        metrics: The names of further sums that the loss returns. Their means are in every record of metrics.jsonl
            ("accuracy", "val_accuracy"). If the loss of a language model has auxiliary terms, it returns the loss of
            the tokens alone as "token_loss", from which perplexity is computed.
    """

    metrics: tuple[str, ...]

    def __call__(self, output: Any, targets: Tensor, weights: Tensor | None) -> Sums:
        """Compute the loss of one micro-batch.

        Args:
            output: The output of the last layer: a tensor [b, ...], or a tuple of tensors, as the loss expects it.
            targets: [b, ...].
            weights: [b], or None if every sample counts 1.

        Returns:
            Sums over the terms that count.
        """
        ...


def copy_to_try(loss: Any) -> Any:
    """Return a copy of a loss, which may count its calls, for a check to call; the loss itself if copying fails."""
    try:
        return copy.deepcopy(loss)
    except Exception:  # a user's code
        return loss


def check_is_loss(loss: Any) -> None:
    """Check an object that is used as a loss, before it is called. Raises ModelError."""
    metrics = getattr(loss, "metrics", None)
    if inspect.isclass(loss) and metrics is not None:
        raise ModelError(f"the loss is the class {loss.__name__}; give an object, {loss.__name__}()")
    if not callable(loss) or metrics is None:
        given = loss if inspect.isclass(loss) or inspect.isroutine(loss) else type(loss)
        name = f"{given.__module__}.{given.__name__}".removeprefix("builtins.")
        raise ModelError(
            f"{name} is not a loss of this project. A loss returns a sum and a count (models.losses.Sums), from which "
            "the mean over the global batch is right in every layout, and names its metrics. Of torch's losses "
            f"{', '.join(f'nn.{kind.__name__}()' for kind in _OF_TORCH)} are turned into that; docs/own_model.md, "
            "'A loss', shows how to write another"
        )
    modules = [m for m in (loss, *getattr(loss, "__dict__", {}).values()) if isinstance(m, nn.Module)]
    if own := [name for module in modules for name, p in module.named_parameters() if p.requires_grad]:
        raise ModelError(
            f"the loss {type(loss).__name__} has parameters ({', '.join(own)}), which no run would train. Keep them in "
            "the last layer: either it passes them on with its output, or it computes the loss itself, in a method "
            "loss(*tensors, targets, weights). Parameters that are not trained need requires_grad_(False)"
        )
    if isinstance(metrics, str) or not all(isinstance(name, str) for name in metrics):
        raise ModelError(f"{type(loss).__name__}.metrics={metrics!r} must be names, such as ('accuracy',)")
    if taken := ", ".join(map(repr, sorted(_RECORDED.intersection(metrics)))):
        raise ModelError(f"{type(loss).__name__}.metrics has the name {taken}, which is reserved; choose another")


def check_sums(name: str, metrics: tuple[str, ...], sums: Any) -> None:
    """Check that the loss ``name`` has returned ``Sums`` of scalars, one for each of ``metrics``. Raises ModelError."""
    how = "return models.losses.Sums(loss, count, metrics) of scalar tensors: the sum of the terms, and their number"
    if not isinstance(sums, Sums):
        raise ModelError(f"the loss {name} returned {type(sums).__name__}; {how}")
    for key, value in (("loss", sums.loss), ("count", sums.count), *zip(metrics, sums.metrics, strict=False)):
        if not isinstance(value, Tensor) or value.dim() > 0:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            raise ModelError(f"the loss {name} returned {type(value).__name__}{shape} as its {key}; {how}")
    if len(sums.metrics) != len(metrics):
        named = f"{len(metrics)} metrics ({', '.join(metrics)})"
        raise ModelError(f"the loss {name} has {named} and returned {len(sums.metrics)}; give one sum for each name")


def assert_all(holds: Tensor, problem: str) -> None:
    """Raise RuntimeError if an element is false. The host does not wait: a GPU's error comes at a later operation."""
    if holds.device.type == "mps":  # torch has no such operator there
        return
    torch._assert_async(holds.all(), problem)  # pyright: ignore[reportPrivateImportUsage]  # torch 2.11, 2.13, 2.15


def per_element(weights: Tensor | None, like: Tensor) -> Tensor:
    """Expand sample weights, [b] or None for all ones, to the shape [b, ...] and dtype of the loss terms ``like``."""
    if weights is None:
        return torch.ones_like(like)
    return weights.to(like.dtype).view(-1, *[1] * (like.dim() - 1)).expand_as(like)


def mask_targets(targets: Tensor, weights: Tensor | None) -> Tensor:
    """Set the int64 targets [b, ...] of samples without weight (padding) to ``IGNORED``; ``weights`` is [b] or None."""
    if weights is None:
        return targets
    padding = weights.view(-1, *[1] * (targets.dim() - 1)) == 0
    return targets.masked_fill(padding, IGNORED)


def _known(targets: Tensor) -> Tensor:
    return (targets != IGNORED).sum()


def is_by_sample(loss: Any) -> bool:
    """Return whether a loss, or a layer's method, is known to be a sum over samples without the samples of weight 0."""
    if isinstance(loss, Several):
        return all(map(is_by_sample, loss.losses.values()))
    call = loss if loss is None or inspect.isroutine(loss) else type(loss).__call__
    return getattr(call, "__module__", None) in _BY_SAMPLE


def is_of_tokens(loss: Any) -> bool:
    """Return whether the loss of a language model is a mean over tokens, from which a perplexity can be computed."""
    return getattr(loss, "of_tokens", True)


def means(loss: Loss, sums: Sequence[float]) -> dict[str, float]:
    """Return the mean "loss" and that of each metric, from the totals [loss, count, *metrics]; {} if count is 0."""
    total, count, *metrics = sums
    if isinstance(loss, Several) and count:
        return loss.means(metrics)
    named = zip(("loss", *loss.metrics), (total, *metrics), strict=True)
    return {name: value / count for name, value in named if count}


def loss_of(layer: Any) -> Callable[..., Any] | None:
    """Return the method ``loss`` of a last layer that computes the loss itself; None for other layers.

    If the attribute ``loss`` is a module, such as a torch loss, it is not this method.
    """
    loss = getattr(layer, "loss", None)
    return loss if callable(loss) and not isinstance(loss, nn.Module) else None


class OneHotSquaredError:
    """Squared error between logits [b, c] and the one-hot class [b], summed over all c.

    The count is the number of samples times c. Targets with the value ``IGNORED`` do not count.
    """

    metrics: tuple[str, ...] = ()

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """See ``Loss``."""
        counted = targets != IGNORED
        output = _at_least_float32(output)
        one_hot = F.one_hot(targets.where(counted, 0), output.shape[1]).to(output.dtype)
        weights = counted.to(output.dtype) if weights is None else weights * counted
        return SquaredError()(output, one_hot, weights)


class ClassCrossEntropy:
    """Cross entropy of logits [b, c] against classes [b], summed over samples, and the number of correct predictions.

    Targets with the value ``IGNORED`` and samples of weight 0 do not count.
    """

    metrics: tuple[str, ...] = ("accuracy",)

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """See ``Loss``. Raises ValueError if targets are not one class for each sample."""
        if targets.is_floating_point() or targets.dim() != output.dim() - 1:
            column = targets.shape[1:] == (1,)
            whole = "targets.long()" if targets.dim() == 1 else "targets[:, 0]" if column else "targets.argmax(dim=1)"
            raise ValueError(f"targets must be one class number for each sample: give {whole}")
        targets = mask_targets(targets, weights)
        loss = F.cross_entropy(_at_least_float32(output), targets, reduction="sum", ignore_index=IGNORED)
        return Sums(loss, _known(targets), ((output.argmax(dim=1) == targets).sum(),))

    count = staticmethod(_known)


class TokenCrossEntropy:
    """Cross entropy of logits [b, t, v] against next tokens [b, t], summed over tokens.

    ``FusedHead.loss`` computes the same without storing the logits.

    Args:
        label_smoothing: As in ``F.cross_entropy``, in [0, 1).
        z_loss: The factor of logsumexp(logits)^2, which is added for each token (PaLM, Chowdhery et al. 2022: 1e-4).
            With this or label smoothing, the metric "token_loss" is the cross entropy alone.
    """

    metrics: tuple[str, ...] = ()

    def __init__(self, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        self.label_smoothing, self.z_loss = label_smoothing, z_loss
        self.metrics = ("token_loss",) if label_smoothing or z_loss else ()

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """See ``Loss``."""
        targets = mask_targets(targets, weights).flatten()
        logits = _at_least_float32(output.flatten(0, 1))
        loss = of_tokens = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        counted, smoothing = targets != IGNORED, self.label_smoothing
        if smoothing:
            loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing)
        if self.z_loss:
            loss = loss + self.z_loss * (logits.logsumexp(1).square() * counted).sum()
        return Sums(loss, counted.sum(), (of_tokens.detach(),) * len(self.metrics))

    count = staticmethod(_known)


class ElementwiseLoss:
    """A torch loss that compares element with element, summed over all elements. The count is the number of elements.

    Args:
        terms: The torch loss, such as ``nn.MSELoss(reduction="none")``.
    """

    metrics: tuple[str, ...] = ()

    def __init__(self, terms: nn.Module) -> None:
        self.terms = terms

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """See ``Loss``. Raises ValueError if output and targets differ in shape."""
        _check_same_shape(self.terms, output, targets)
        terms = _terms(self.terms, output, targets)
        scale = per_element(weights, terms)
        return Sums((terms * scale).sum(), scale.sum())

    count = staticmethod(torch.numel)


class SquaredError(ElementwiseLoss):
    """Squared error summed over all elements of output and targets [b, ...].

    The count is the number of elements, so the mean equals the mean of ``nn.MSELoss``.
    """

    def __init__(self) -> None:
        super().__init__(nn.MSELoss(reduction="none"))


class TorchCrossEntropy:
    """``nn.CrossEntropyLoss`` of logits [b, c, ...] against classes [b, ...] or their probabilities [b, c, ...].

    The count is torch's divisor: the number of targets that are not ignored, or the sum of their weights.

    Args:
        terms: The torch loss, with reduction "none".
    """

    def __init__(self, terms: nn.CrossEntropyLoss) -> None:
        self.terms = terms
        self.metrics = ("accuracy",) if terms.weight is None else ()

    def __call__(self, output: Tensor, targets: Tensor, weights: Tensor | None) -> Sums:
        """See ``Loss``. Raises ValueError if the classes are in the last dimension."""
        if output.dim() > 2 and targets.shape == output.shape[:-1] and targets.shape[1] != output.shape[2]:
            raise ValueError(
                f"nn.CrossEntropyLoss takes logits [b, classes, ...], and the model gives {tuple(output.shape)} for "
                f"targets {tuple(targets.shape)}: use models.losses.TokenCrossEntropy(), or move the classes forward"
            )
        terms = _terms(self.terms, output, targets)
        counts = self._count_each(targets).to(terms)
        classes = targets.argmax(dim=1) if targets.is_floating_point() else targets
        scale = per_element(weights, terms)
        right = ((output.argmax(dim=1) == classes) * counts * scale).sum()
        return Sums((terms * scale).sum(), (counts * scale).sum(), (right,) * len(self.metrics))

    def count(self, targets: Tensor) -> Tensor:
        """See ``Loss``."""
        return self._count_each(targets).sum()

    def _count_each(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return torch.ones_like(targets[:, 0])
        counted, of_classes = targets != self.terms.ignore_index, self.terms.weight
        if of_classes is None:
            return counted.to(_wide(targets))
        return counted * of_classes.to(targets.device, _wide(targets))[targets.where(counted, 0)]


_ELEMENTWISE = (nn.MSELoss, nn.BCEWithLogitsLoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_OF_TORCH = (nn.CrossEntropyLoss, *_ELEMENTWISE)


def as_sums(loss: Any) -> Any:
    """Return a torch loss that is a mean over its terms as sum and count, and a list or dict of losses as ``Several``.

    Any other object is returned unchanged.

    Raises:
        ModelError: If the options of the loss make it something other than this mean.
    """
    if isinstance(loss, (Mapping, list, tuple)):
        return Several(loss)
    if type(loss) not in _OF_TORCH:
        return loss
    name = f"nn.{type(loss).__name__}"
    if loss.reduction != "mean":
        raise ModelError(
            f'{name}(reduction="{loss.reduction}"): training takes the mean over the global batch; leave reduction out'
        )
    terms = copy.copy(loss)
    terms.reduction = "none"
    if isinstance(terms, nn.CrossEntropyLoss):
        return TorchCrossEntropy(terms)
    if getattr(loss, "weight", None) is not None:
        raise ModelError(
            f"{name}(weight=...) weighs the places of a batch, which every layout cuts differently; weigh classes by "
            "pos_weight=, or write a loss (docs/own_model.md, 'A loss')"
        )
    return ElementwiseLoss(terms)


class Several:
    """Several losses. Each is a mean over its own targets in the global batch; the loss is the sum of these means.

    The first loss gets the model's first output and the first of the targets, and so on. If the model has one output,
    or the data one tensor of targets, all losses get it. The metrics of the loss NAME are ``NAME_loss``,
    ``NAME_METRIC`` for each of its metrics, and ``NAME_count``, the number of targets that count. A loss for which no
    target of a batch counts adds nothing.

    Args:
        losses: Losses by name; or a list of losses, which get the names target_1, target_2, ... Each is a loss of torch
            or of this module, or one that has a method ``count`` (see ``Loss``).
        weights: The factors of the losses by name, or in their order; 1 where they are not given.

    Attributes:
        totals: The number of targets of each loss in the global batch, [losses]. A training step sets it, so that the
            gradient is that of the sum of the means.

    Raises:
        ModelError: If a loss or a weight cannot be used.
    """

    totals: Tensor | None = None

    def __init__(self, losses: Any, weights: Any = None) -> None:
        self.losses = {name: as_sums(loss) for name, loss in _by_name(losses).items()}
        self.weights = dict.fromkeys(self.losses, 1.0) | _by_name(weights or {})
        if unknown := self.weights.keys() - self.losses.keys():
            raise ModelError(f"weights={weights}: there is no loss {min(unknown)}, only {', '.join(self.losses)}")
        for loss in self.losses.values():
            check_is_loss(loss)
            if not hasattr(loss, "count"):
                kind = type(loss).__name__
                raise ModelError(f"{kind} is one of several losses: give it a method count(targets), as Sums.count is")
        each = ((name, metric) for name, loss in self.losses.items() for metric in ("loss", *loss.metrics, "count"))
        self.metrics: tuple[str, ...] = tuple(map("_".join, each))
        if twice := next((name for name in self.metrics if self.metrics.count(name) > 1), None):
            raise ModelError(f"two metrics of these losses are named {twice}: rename the loss, or the metric")

    def parts(self, output: Any, targets: Any) -> list[tuple[Any, Any, Any]]:
        """Return each loss with its output and targets. Raises ValueError if there are not as many."""
        n = len(self.losses)
        outputs, of_each = (given if isinstance(given, tuple) else (given,) * n for given in (output, targets))
        if not len(outputs) == len(of_each) == n:
            raise ValueError(f"{n} losses for {len(outputs)} outputs of the model and {len(of_each)} targets")
        return list(zip(self.losses.values(), outputs, of_each, strict=True))

    def counts(self, targets: Any) -> Tensor:
        """Return the number of targets that count for each loss, [losses]."""
        parts = self.parts(None, targets)
        return torch.stack([torch.as_tensor(loss.count(y), dtype=_wide(y), device=y.device) for loss, _, y in parts])

    def __call__(self, output: Any, targets: Any, weights: Tensor | None) -> Sums:
        """See ``Loss``."""
        sums = [loss(*given, weights) for loss, *given in self.parts(output, targets)]
        losses = torch.stack([part.loss * weight for part, weight in zip(sums, self.weights.values(), strict=True)])
        if self.totals is not None:  # a step divides the sum by the sum of all counts, not by the count of each loss
            losses = losses * torch.where(self.totals > 0, self.totals.sum() / self.totals, 0.0).to(losses.device)
        metrics = itertools.chain(*((part.loss, *part.metrics, part.count) for part in sums))
        count = torch.stack([part.count for part in sums]).sum()
        return Sums(losses.sum().to(sums[0].loss.dtype), count, tuple(metrics))

    def means(self, metrics: Sequence[float]) -> dict[str, float]:
        """Return the mean "loss" and the mean of each metric. See ``means``."""
        named = dict(zip(self.metrics, metrics, strict=True))
        counts = {name: named[f"{name}_count"] for name in self.losses}
        for name, loss in self.losses.items():
            keys = (f"{name}_{metric}" for metric in ("loss", *loss.metrics))
            named |= {key: named[key] / counts[name] if counts[name] else math.nan for key in keys}
        return {"loss": sum(self.weights[n] * named[f"{n}_loss"] for n in counts if counts[n]), **named}


def _by_name(given: Any) -> dict[str, Any]:
    items = given.items() if isinstance(given, Mapping) else enumerate(given, 1)
    return {key if isinstance(key, str) else f"target_{key}": value for key, value in items}


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64


def _terms(loss: nn.Module, output: Tensor, targets: Tensor) -> Tensor:
    """Return the terms of a torch loss, in float32 or wider. The tensors of the loss move to the output's device."""
    output = _at_least_float32(output)
    own = {name: buffer.to(output) for name, buffer in loss.named_buffers()}
    of_classes = isinstance(loss, nn.CrossEntropyLoss) and not targets.is_floating_point()
    given = output, targets if of_classes else targets.to(output.dtype)
    return torch.func.functional_call(loss, own, given) if own else loss(*given)  # which takes less time


def _check_same_shape(loss: Any, output: Tensor, targets: Tensor) -> None:
    if output.shape != targets.shape:  # torch would broadcast them
        raise ValueError(
            f"{type(loss).__name__} compares element with element: the model gives {tuple(output.shape)}, the targets "
            f"are {tuple(targets.shape)}; bring both to one shape, such as targets[:, None]"
        )


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
