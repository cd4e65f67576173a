"""The running average of the weights, beside the weights that are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from parallel.pieces import Boxes, Piece
from parallel.stage import Stage
from parallel.strategy import Strategy

TRAINED = "/trained"  # in a checkpoint "w/trained" is the trained weight, if w is the average


class Average:
    """A running average of this rank's parts of the weights. The model holds the average in evaluations and saves.

    Trained parameters are averaged, and on request those floating-point buffers that checkpoints contain. All other
    tensors are the model's.

    Args:
        strategy: The model.
        averaging: The kind of average and its steps, a ``training.callbacks.averaging.Averaging``; None for no average.

    Attributes:
        kind: "ema" or "swa"; None for no average.
    """

    def __init__(self, strategy: Strategy, averaging: Any = None) -> None:
        self._strategy, self._averaging = strategy, averaging
        self.kind: str | None = getattr(averaging, "kind", None)
        self._count, self._in_model = 0, False
        # Of each tensor: stage, name, piece on this rank, and its other numbers (the average, or else the trained).
        self._pairs: list[tuple[Stage, str, Piece, Tensor]] = []

    @torch.no_grad()
    def after(self, step: int, total: int) -> None:
        """Add the weights after ``step`` of ``total`` to the average, if they count. The first ones are copied."""
        if self.kind is None or not self._averaging.is_due(step, total):
            return
        if self._count == 0:
            own = self._of_model(self._averaging.use_buffers)
            self._pairs = [(stage, name, piece, piece.tensor.clone()) for stage, name, piece in own]
        elif self._pairs:  # a stage may have no parameters
            _, _, pieces, averages = zip(*self._pairs, strict=True)
            self._averaging.rule([*averages], [piece.tensor for piece in pieces], self._count)
        self._count += 1

    @torch.no_grad()
    def swap(self, averaged: bool) -> None:
        """Let the model hold the average, or the trained weights."""
        if averaged != self._in_model:
            self._in_model = averaged
            for _, _, piece, other in self._pairs:
                held = piece.tensor.clone()
                piece.tensor.copy_(other)
                other.copy_(held)

    def pieces(self, stage: Stage) -> dict[str, Piece]:
        """Return this rank's pieces of a stage's trained weights, while the model holds the average."""
        own = [(name, piece._replace(tensor=other)) for of, name, piece, other in self._pairs if of is stage]
        return {name + TRAINED: piece for name, piece in own if name not in self._strategy.chain.tied}

    def state_dict(self) -> dict[str, Any] | None:
        """Return the kind of the average and the number of averaged weights; None if nothing is averaged."""
        return None if self.kind is None else {"kind": self.kind, "count": self._count}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any] | None, tensors: Mapping[str, Boxes]) -> None:
        """Continue a checkpoint's average, whose weights the model has loaded; drop an average of another kind."""
        goes_on = state is not None and state["kind"] == self.kind
        self._count, self._pairs, self._in_model = state["count"] if state and goes_on else 0, [], True
        for stage, name, piece in self._of_model(buffers=True) if state else ():
            if (key := self._strategy.chain.canonical(name) + TRAINED) in tensors:
                trained = piece.read(tensors[key]).to(piece.tensor)
                if goes_on:
                    self._pairs.append((stage, name, piece, trained))
                else:
                    piece.tensor.copy_(trained)

    def _of_model(self, buffers: bool) -> Iterator[tuple[Stage, str, Piece]]:
        for stage in self._strategy.stages:
            named = [(name, p) for name, p in stage.layers.named_parameters() if p.requires_grad]
            if buffers:
                floating = [(name, b) for name, b in stage.layers.named_buffers() if b.is_floating_point()]
                saved = stage.layers.state_dict().keys()  # a mask of -inf would average to NaN
                named += [(name, b) for name, b in floating if name in saved and bool(b.isfinite().all())]
            for name, tensor in named:
                yield stage, name, self._strategy.piece(self._strategy.chain.canonical(name), tensor)
