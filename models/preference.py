"""Preference tuning by DPO (Rafailov et al. 2023): each layer computes beside a frozen copy of itself, the reference.

A sample is a pair, the chosen and the rejected answer to a prompt, each after the prompt: token ids [b, 2, t]. Layers
get the 2 b rows of the pairs::

    tokens --+--> embedding               --> h.0               --> ... head ---------------+--> loss of b pairs
             +--> embedding.dpo_reference --> h.0.dpo_reference --> ... head.dpo_reference -+

So a batch passes through the stages once. A reference's parameters begin with the layer's numbers, are never trained,
and are in no checkpoint. Those of a parameter that is frozen in the layer, as under adapters, are that parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import ModelError
from models.auxiliary import collecting
from models.chain import REFERENCE, Chain, as_tuple, is_within
from models.losses import IGNORED, Loss, Sums, TokenCrossEntropy, loss_of, mask_targets

NAME = "dpo"  # the value of model.loss
_GIVEN = "given_to_reference"


class DPO:
    """The loss of DPO: -log sigmoid(margin), summed over the pairs that have an answer, which it counts.

    A reward is beta times the log-probability of an answer less the reference's, and the margin of a pair is the chosen
    answer's reward less the rejected one's. With ``label_smoothing`` s, the loss is
    -(1 - s) log sigmoid(margin) - s log sigmoid(-margin) (Mitchell 2023).

    Attributes:
        of_tokens: Whether the loss is a mean over tokens.
    """

    metrics: tuple[str, ...] = ("rewards_chosen", "rewards_rejected", "margin", "accuracy")
    of_tokens = False

    def __init__(self, answer: Loss, beta: float, label_smoothing: float) -> None:
        """``answer`` computes the negative log-probability of answers from logits."""
        self.answer, self.beta, self.label_smoothing = answer, beta, label_smoothing

    def __call__(self, output: Any, targets: Tensor, weights: Tensor | None, answers: Any = None) -> Sums:
        """See ``Loss``.

        Args:
            output: The tensors [2 b, ...] of the model, and behind them as many of the reference.
            targets: [b, 2, t].
            weights: [b], or None if every pair counts.
            answers: Two functions (*tensors, targets [1, t], None) -> Sums, the negative log-probability of a row, for
                the model and the reference. None if the output is logits.
        """
        rows, half = mask_targets(targets, weights).flatten(0, 1), len(output) // 2
        answer, of_reference = answers or (self.answer, self.answer)
        scores = _log_probabilities(answer, output[:half], rows)
        with torch.no_grad():
            scores_of_reference = _log_probabilities(of_reference, output[half:], rows)
        chosen, rejected = (self.beta * (scores - scores_of_reference)).view(-1, 2).unbind(dim=1)
        margins, smoothing = chosen - rejected, self.label_smoothing
        losses = (smoothing - 1) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)
        counted = (rows != IGNORED).view(len(targets), -1).any(dim=1)
        loss, *metrics = ((x * counted).sum() for x in (losses, chosen, rejected, margins, margins > 0))
        return Sums(loss, counted.sum(), tuple(metrics))


def _log_probabilities(answer: Callable[..., Sums], tensors: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Return the log-probability of each row of targets, [rows]. A row at a time needs the memory of its logits."""
    rows = zip(*(x.split(1) for x in (*tensors, targets)), strict=True)
    return -torch.stack([answer(*row, None).loss for row in rows])


class _ComparingHead:
    """A last layer that computes the loss itself, and now that of pairs."""

    preference: DPO

    def loss(self, *given: Any) -> Sums:
        reference: Any = getattr(self, REFERENCE)
        return self.preference(given[:-2], *given[-2:], (super().loss, reference.loss))  # pyright: ignore


class _Sequence:
    """An ``nn.Sequential`` that does not call its reference."""

    def forward(self, x: Any) -> Any:
        for name, layer in self._modules.items():  # pyright: ignore[reportAttributeAccessIssue]
            x = layer(x) if name != REFERENCE else x
        return x


def prefer(chain: Chain, beta: float = 0.1, label_smoothing: float = 0.0) -> Chain:
    """Return a chain that is trained on pairs of answers, by the loss of trl's ``DPOTrainer``.

    Args:
        chain: A language model. Its weights at the start are the reference; of adapted ones, those of the base.
        beta: The factor of rewards, above 0. A larger one keeps the model nearer to the reference.
        label_smoothing: The probability, in [0, 0.5), that the answers of a pair are the wrong way round.

    Raises:
        ModelError: If a number is out of range, or the loss of the chain is no cross entropy of tokens.
    """
    if not beta > 0 or not 0 <= label_smoothing < 0.5:
        raise ModelError(f"model.dpo: beta={beta} must be above 0, and label_smoothing={label_smoothing} in [0, 0.5)")
    if type(chain.loss) is not TokenCrossEntropy or len(chain.layers) == 1:
        given = f"{type(chain.loss).__name__} and the layers {', '.join(chain.names[:3])}"
        raise ModelError(f"model.loss={NAME} needs a model of several layers with TokenCrossEntropy, not {given}")
    loss, names, base = DPO(chain.loss, beta, label_smoothing), chain.names, chain.base or chain
    built = cache(lambda *builds: partial(_build, *builds))  # layers with the same ``build`` still have the same
    last = {names[-1]: loss}

    def beside(name: str) -> str:
        layer = next(layer for layer in names if is_within(f"{name}.", [layer]))
        return f"{layer}.{REFERENCE}{name[len(layer) :]}"

    named = chain.skeleton().named_parameters(remove_duplicate=False)
    trained = {chain.canonical(name) for name, parameter in named if parameter.requires_grad}
    tied = dict(chain.tied)
    for name, _ in base.skeleton().named_parameters(remove_duplicate=False):
        original = chain.canonical(name)
        if original not in trained:
            tied[beside(name)] = original
        elif original != name:
            tied[beside(name)] = beside(original)
    cut = {beside(name): how for name, how in chain.cut.items() if is_within(f"{name}.", names)}
    layers = [
        replace(layer, build=built(layer.build, reference.build, layer.name == names[0], last.get(layer.name)))
        for layer, reference in zip(chain.layers, base.layers, strict=True)
    ]
    return replace(chain, layers=layers, loss=loss, tied=tied, cut={**chain.cut, **cut})


def _build(
    build: Callable[[], nn.Module], of_reference: Callable[[], nn.Module], first: bool, loss: DPO | None
) -> nn.Module:
    """Build a layer that computes its reference too. ``loss`` is that of the last layer."""
    layer, reference = build(), of_reference().requires_grad_(False).eval()
    layer.add_module(REFERENCE, reference)
    layer.register_forward_pre_hook(partial(_enter, first), prepend=True)  # before hooks that know the layer's inputs
    layer.register_forward_hook(_leave)
    if type(layer).forward is nn.Sequential.forward:
        layer.__class__ = _with(_Sequence, type(layer))
    if loss is not None and loss_of(layer) is not None:
        layer.__class__ = _with(_ComparingHead, type(layer))
        layer.preference = loss  # pyright: ignore[reportArgumentType]  # its stub knows tensors only
    return layer


@cache
def _with(own: type, kind: type) -> type:
    return type(kind.__name__, (own, kind), {})


def _enter(first: bool, layer: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Take the reference's inputs, which are behind the layer's; the first layer gets its pairs once."""
    both = 2 * tuple(x.flatten(0, 1) for x in given) if first else given
    vars(layer)[_GIVEN] = both[len(both) // 2 :]
    return both[: len(both) // 2]


@torch.no_grad()
def _leave(layer: nn.Module, _: Any, output: Any) -> tuple[Tensor, ...]:
    """Compute the reference, without an auxiliary loss, and return its output behind the layer's."""
    with collecting(None):
        of_reference = getattr(layer, REFERENCE)(*vars(layer).pop(_GIVEN))
    return (*as_tuple(output), *as_tuple(of_reference))
