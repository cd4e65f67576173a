"""A stage: the layers that one rank runs as one piece, from an incoming tensor to an outgoing one or to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.batchnorm import BatchNorm2d
from models.chain import Chain
from models.losses import Sums
from models.seeds import derive_seed, seed_generator


class Stage(nn.Module):
    """Layers ``names`` of ``chain`` with their weights on ``device``; parameters keep the whole model's names.

    A strategy calls ``begin`` before each step's micro-batches and ``end`` after them; ``sums`` collects, for each
    micro-batch of a stage that ends the chain, [loss, count, *metrics] as float64.
    """

    def __init__(
        self,
        chain: Chain,
        names: Sequence[str],
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.chain, self.device, self.seed, self.recompute = chain, device, seed, recompute
        self.layers = chain.build(names, seed, device, dtype)
        if chain.channels_last:
            self.layers.to(memory_format=torch.channels_last)  # convolutions follow their weights
        self.begins_chain, self.ends_chain = names[0] == chain.names[0], names[-1] == chain.names[-1]
        self.step = 0
        self.loss_scale = 1.0
        self.sums: list[Tensor] = []

    def begin(self, training: bool, step: int = 0, loss_scale: float = 1.0) -> None:
        """A step of training (``step`` counts from 1) or of evaluation starts; no weight changes until ``end``."""
        self.train(training)
        self.step, self.loss_scale = step, loss_scale
        self._keep_casts({})

    def end(self) -> None:
        """The step's forwards and backwards are done; weights may change."""
        self._keep_casts(None)

    def _keep_casts(self, cache: dict | None) -> None:
        last = self.layers[self.layers.names[-1]]
        if hasattr(last, "step_cache"):
            last.step_cache = cache

    def forward(
        self, x: Tensor, microbatch: Tensor, targets: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """One micro-batch.

        x           [b, ...] the batch's inputs, or what the stage before gave (``as_sent``)
        microbatch  [1 or more] int64, equal: the micro-batch's index in the global batch: dropout is drawn for it
        targets     [b, ...] and weights [b], used by the stage that ends the chain and ignored by the others
        returns     the next stage's input; from the stage that ends the chain, where targets are given, the scalar to
                    differentiate: the summed loss times ``loss_scale``
        """
        index = int(microbatch.flatten()[0])
        if not self.begins_chain:
            x = self._as_received(x)
        if not self.ends_chain:
            return self.as_sent(self.run(x, index))
        if targets is None:
            return self.run(x, index).contiguous()
        sums = self._loss(x, index, targets, weights)
        self.sums.append(sums.stack())
        return sums.loss * self.loss_scale

    def as_sent(self, x: Tensor) -> Tensor:
        """``x`` as it goes to the next stage: contiguous; images in channels_last, [b, c, h, w], as the [b, h, w, c]
        that lies in memory, so that neither they nor their gradients are put into another order on either side."""
        x = (x.permute(0, 2, 3, 1) if self._images(x) else x).contiguous()
        # Where input and weight gradients are taken apart, torch detaches what was sent in place: a view refuses.
        return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x

    def _as_received(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2) if self._images(x) else x

    def _images(self, x: Tensor) -> bool:
        return self.chain.channels_last and x.dim() == 4

    def run(self, x: Tensor, index: int) -> Tensor:
        """Micro-batch ``index`` through all layers, in the memory format that the last one leaves it in."""
        return self._run(self.layers.items(), x, index)

    def _loss(self, x: Tensor, index: int, targets: Tensor, weights: Tensor | None) -> Sums:
        *body, (name, last) = self.layers.items()
        if not hasattr(last, "loss"):
            return self.chain.loss(self.run(x, index), targets, weights)
        x = self._run(body, x, index)
        self._seed(name, index)
        return last.loss(x, targets, weights)

    def _run(self, layers: Sequence[tuple[str, nn.Module]], x: Tensor, index: int) -> Tensor:
        if self._images(x):
            x = x.contiguous(memory_format=torch.channels_last)  # data comes in plain order
        for name, layer in layers:
            if self.recompute and torch.is_grad_enabled():
                # The layer seeds itself, in the recomputation too, so there is no random state to preserve.
                x = checkpoint(
                    self._run_one,
                    name,
                    layer,
                    x,
                    index,
                    self.step,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=partial(_contexts, layer),
                )
            else:
                x = self._run_one(name, layer, x, index, self.step)
        return x

    def _run_one(self, name: str, layer: nn.Module, x: Tensor, index: int, step: int) -> Tensor:
        self._seed(name, index)
        return layer(x)

    def _seed(self, name: str, index: int) -> None:
        if self.training:
            seed_generator(self.device, derive_seed(self.seed, self.step, index, name))

    def compile(self) -> None:
        """Compile each layer in place (``nn.Module.compile``), so that names stay."""
        for _, layer in self.layers.items():
            layer.compile()

    def take_sums(self) -> Tensor | None:
        """The sums of all micro-batches since the last call, added up: [2 + metrics] float64; None without any."""
        total = torch.stack([sums.to(self.device) for sums in self.sums]).sum(dim=0) if self.sums else None
        self.sums.clear()
        return total


def _contexts(layer: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """For the forward and for its recomputation, which BatchNorm must not count again."""
    return nullcontext(), _Recomputing(layer)


class _Recomputing(AbstractContextManager):
    """Entered for each recomputation: twice, where gradients of inputs and of weights are taken apart."""

    def __init__(self, layer: nn.Module) -> None:
        self._norms = [module for module in layer.modules() if isinstance(module, BatchNorm2d)]

    def __enter__(self) -> None:
        for norm in self._norms:
            norm.recomputing = True

    def __exit__(self, *exception) -> None:
        for norm in self._norms:
            norm.recomputing = False
