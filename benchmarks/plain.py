"""The loop that one writes by hand, as nanoGPT has it, on the weights, batches and device of a ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.trainer import Trainer
from parallel.devices import synchronize
from parallel.precision import autocast

# (inputs, targets) of a micro-batch -> their mean loss
Loss = Callable[[Tensor, Tensor], Tensor]


class PlainLoop:
    """Gradient accumulation under autocast, clipping and update, with nothing of this project's around them.

    The batch, its micro-batches, the precision and the clipping are those of a trainer's configuration.
    """

    def __init__(self, trainer: Trainer, loss: Loss, optimizer: torch.optim.Optimizer, compiled: bool = False) -> None:
        """Take what is trained.

        Args:
            trainer: What this is compared with.
            loss: The model's.
            optimizer: Over the model's parameters.
            compiled: Whether model and loss are compiled together.
        """
        self._trainer, self._optimizer = trainer, optimizer
        self._loss = torch.compile(loss) if compiled else loss

    def step(self, number: int) -> float:
        """Run a step to its end; returns the mean loss of its last micro-batch."""
        cfg, plan, device = self._trainer.setup.cfg.train, self._trainer.setup.plan, self._trainer.strategy.device
        batch = self._trainer.batch(number).to(device, non_blocking=True)
        self._optimizer.zero_grad()
        for part in batch.chunks(plan.chunks):
            with autocast(plan.precision, plan.device_type):
                loss = self._loss(part.inputs, part.targets)
            (loss / plan.chunks).backward()
        if cfg.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self._optimizer.param_groups[0]["params"], cfg.grad_clip)
        self._optimizer.step()
        mean = loss.item()
        synchronize(device)
        return mean


def adamw(model: nn.Module, fused: bool = True) -> torch.optim.AdamW:
    """Return AdamW with the settings that nanoGPT trains GPT-2 with."""
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused or None)


def token_loss(model: nn.Module) -> Loss:
    """Return torch's cross entropy of ``model``'s logits."""
    return lambda inputs, targets: F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def same_model(trainer: Trainer) -> nn.Module:
    """Return the trainer's model with the same initial weights, as a plain module on the same device."""
    chain = trainer.setup.chain
    return chain.build(chain.names, trainer.setup.cfg.seed, trainer.strategy.device)
