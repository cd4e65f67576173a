"""A training step for a benchmark, without loop and records: this project's, and the one that one writes by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import take_turns
from conf.composition import compose
from conf.instantiate import to_config, to_dict
from data.dataset import Batch
from data.loader import TrainBatches
from parallel.devices import autocast, synchronize
from parallel.strategy import Options, build_strategy
from training.optimizer import Optimizer
from training.run.prepare import prepare, set_arithmetic
from training.run.setup import Setup

# A Transformer that can be cut into two stages of equal time: with fewer layers or more words, the projection onto the
# words would be most of the work. Here it costs as much as two of the eight layers.
TRANSFORMER = (
    "model=transformer", "model.d_model=256", "model.d_hid=1024", "model.n_layer=8", "data.max_vocabulary=6144",
    "data.seq_len=128", "train.grad_clip=null", "optim=sgd", "scheduler=constant",
)  # fmt: skip
KEPT_BATCHES = 2  # read once and used in turn: reading is not what is measured
# (inputs, targets) of a micro-batch -> their mean loss
Loss = Callable[[Tensor, Tensor], Tensor]


def configured(overrides: Sequence[str]) -> Setup:
    """Return what ``python train.py OVERRIDES`` would prepare."""
    return prepare(composed(overrides))


def composed(overrides: Sequence[str]) -> Any:
    """Return the configuration of ``python train.py OVERRIDES``."""
    return to_config(to_dict(compose(overrides)))


class Trainer:
    """One rank of a layout."""

    def __init__(self, setup: Setup, rank: int = 0, local_rank: int | None = None) -> None:
        """Build the strategy and the optimizer and reads the batches.

        Args:
            setup: What is trained.
            rank: The rank in the layout, which may have fewer ranks than the benchmark has processes.
            local_rank: The index of the GPU to use; ``rank`` if not given.
        """
        cfg, mesh = setup.cfg, setup.plan.mesh(rank).connect(timeout_s=600.0)
        device_index = rank if local_rank is None else local_rank
        self.setup = setup
        set_arithmetic(cfg.train)
        options = Options(cfg.seed, cfg.parallel.timeout_s, cfg.train.compile)
        self.strategy = build_strategy(setup.plan, setup.chain, mesh, options, setup.sample, device_index)
        self.optimizer = Optimizer(to_dict(cfg.optim), self.strategy)
        batches = TrainBatches(setup.data.train, setup.plan.global_batch_size, cfg.seed, mesh.replica, mesh.dp)
        self._batches = [batches[number] for number in range(1, KEPT_BATCHES + 1)]
        if self.strategy.device.type == "cuda":  # as the run's loader does
            self._batches = [batch.pin_memory() for batch in self._batches]

    @classmethod
    def build(cls, rank: int, overrides: Sequence[str]) -> Trainer:
        """Return a trainer for the command line ``overrides``."""
        return cls(configured(overrides), rank)

    def batch(self, number: int) -> Batch:
        """Return this replica's batch of step ``number``."""
        return self._batches[(number - 1) % KEPT_BATCHES]

    def step(self, number: int) -> float:
        """Run forward, backward, the exchange between ranks and the update to their end; returns the loss."""
        result = self.strategy.train_step(self.batch(number), number)
        if (limit := self.setup.cfg.train.grad_clip) is not None:
            self.strategy.clip_grad_norm_(limit, result.grad_norm)
        self.optimizer.step(self.optimizer.base_lr)
        synchronize(self.strategy.device)
        return result.loss


def in_turns(rank: int, runs: Mapping[str, Sequence[str]], rounds: int, alone: str) -> dict[str, list[float]]:
    """Return the seconds of the steps of runs that take turns in the same processes, of which this one is ``rank``.

    Each process has its own of a run that is of one process; but during the one called ``alone``, only the first works.
    """
    steps: dict[str, Callable[[int], object]] = {}
    for name, overrides in runs.items():
        if name == alone and rank != 0:
            steps[name] = lambda number: None
            continue
        setup = configured(overrides)
        trainer = Trainer(setup, rank if setup.plan.processes > 1 else 0, local_rank=rank)
        steps[name] = trainer.step
    return take_turns(steps, rounds, barrier=dist.barrier)


class PlainLoop:
    """nanoGPT's loop on the batches and the device of a ``Trainer``: accumulation, autocast, clipping, update.

    The batch, its micro-batches, the precision and the clipping are those of the trainer's configuration.
    """

    def __init__(self, trainer: Trainer, loss: Loss, optimizer: torch.optim.Optimizer, compiled: bool = False) -> None:
        """Takes what is trained; ``compiled``: model and loss are compiled together."""
        self._trainer, self._optimizer = trainer, optimizer
        self._loss = torch.compile(loss) if compiled else loss

    def step(self, number: int) -> float:
        """Run a step to its end and return the mean loss of its last micro-batch."""
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
