"""The objects of a run, and values derived from them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from common.errors import DataError
from conf import COMMAND
from conf.instantiate import to_dict
from conf.masking import mask_secrets
from conf.schema import Root
from data.dataset import Batch, DataSet, InMemory, Source
from data.loader import EvalBatches, TrainBatches
from models.chain import LOSS, Chain
from models.losses import is_of_tokens
from parallel.examination import Examination, examine
from parallel.plan import Plan
from parallel.strategies import strategy_info
from planner.work import Works, work_of

TERMS = ("label_smoothing", "z_loss")  # keys of the section train
_DIGITS = 12  # of a digest
_SAMPLES = 8  # of each split, for a digest; also for an examination, if the data is not in memory


@dataclass
class Setup:
    """The objects of a run.

    Attributes:
        cfg: The configuration.
        chain: The model.
        data: The data set, prepared.
        plan: The layout.
        nodes: The number of machines, as far as it is known before the run.
        shares: The measured costs of stages: (fractions of 1, "of the time" or "of the memory"); None if not measured.
        earlier: The earlier sizes of the global batch in a resumed run, each as (last step of this size, size).
    """

    cfg: Root
    chain: Chain
    data: DataSet
    plan: Plan
    nodes: int = 1
    shares: tuple[list[float], str] | None = None
    earlier: Sequence[tuple[int, int]] = ()

    @cached_property
    def shown(self) -> dict[str, Any]:
        """The configuration as plain data, with secrets masked."""
        return {key: value for key, value in mask_secrets(to_dict(self.cfg)).items() if key != COMMAND}

    @cached_property
    def data_digest(self) -> str:
        """A digest of the data. Ranks compare it, and a resumed run compares it with its checkpoint's."""
        return data_digest(self.data)

    @property
    def evaluation(self) -> str:
        """A digest of what evaluations measure: the validation split, the evaluated part of it, and the loss."""
        model, kind = self.shown["model"], type(self.chain.loss)
        loss = f"{kind.__module__}.{kind.__qualname__} {model.get('loss')} {self.cfg.train.eval_batches}"
        loss += "".join(f" {key}={self.cfg.train[key]}" for key in TERMS if self.cfg.train[key])
        loss += f" {to_dict(self.cfg)['metrics']}" if self.cfg.metrics else ""
        return f"{data_digest(self.data, (self.data.valid,))} {hashlib.sha256(loss.encode()).hexdigest()[:_DIGITS]}"

    @property
    def of_tokens(self) -> bool:
        """Whether the loss is a mean over the tokens of texts."""
        return self.data.seq_len is not None and is_of_tokens(self.chain.loss)

    @cached_property
    def per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return self.batches().steps_per_epoch

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        steps, epochs = self.cfg.train.steps, self.cfg.train.epochs
        limits = ([] if steps is None else [steps]) + ([] if epochs is None else [self.batches().steps_until(epochs)])
        return min(limits)

    def batches(self, replica: int = 0) -> TrainBatches:
        """Return the training batches of a replica."""
        size = self.cfg.train.global_batch_size
        return TrainBatches(self.data.train, size, self.cfg.seed, replica, self.plan.dp, self.earlier)

    @property
    def sample(self) -> Batch:
        """One micro-batch of training data, for its shapes and dtypes."""
        indices = np.zeros(self.plan.microbatch_size, dtype=np.int64)
        return Batch(*self.data.train.read(indices, 0))

    def some(self, count: int) -> Batch:
        """Return ``count`` samples, spread evenly over the training data."""
        rows = np.linspace(0, len(self.data.train) - 1, count)
        return Batch(*self.data.train.read(rows.astype(np.int64), 0))

    @property
    def known(self) -> list[Batch]:
        """One batch of all samples per split in memory, training first; empty if the training data is not in memory."""
        splits = (self.data.train, self.data.valid, self.data.test)
        memories = [split for split in splits if isinstance(split, InMemory)]
        held = [split for split in memories if type(split).read is InMemory.read and len(split) > 0]
        return [Batch(split.inputs, split.targets) for split in held] if held and held[0] is self.data.train else []

    @cached_property
    def work(self) -> tuple[Works, int]:
        """The work of each layer for one sample, and the size of the smallest micro-batch that the layers accept."""
        return work_of(self.chain, self.some(1), self.plan.precision)

    @cached_property
    def examination(self) -> Examination:
        """The facts of the layers and of the loss in training."""
        return examine(self.chain, self.sample, self.known or [self.some(_SAMPLES)])

    @property
    def extents(self) -> dict[str, str]:
        """The evaluated part of "val" and "test", such as "2 of 73 batches"; without splits evaluated as a whole."""
        batch, limit = self.plan.global_batch_size, self.cfg.train.eval_batches
        sources = {"val": self.data.valid, "test": self.data.test}
        batches = {name: EvalBatches(source, batch, limit=limit) for name, source in sources.items() if source}
        return {name: f"{len(b)} of {b.whole} batches" for name, b in batches.items() if len(b) < b.whole}

    @cached_property
    def has_batchnorm(self) -> bool:
        """Whether a layer of the model normalizes over samples in training."""
        return any(isinstance(module, _BatchNorm) and module.training for module in self.chain.skeleton().modules())

    @cached_property
    def by_microbatch(self) -> tuple[str | None, list[str]]:
        """The micro-batch size if numbers depend on it (otherwise None), and a line for each reason."""
        plan, size, lines = self.plan, None, []
        info = strategy_info(plan.strategy)
        copies = len(plan.devices) if info.several_devices and not info.stages else 1
        each, pieces = plan.microbatch_size // copies, plan.dp * plan.chunks * copies
        if drawing := plan.facts["draws"]:
            size = f"{each}"
            draw = f"{self._named(drawing)} {'draws by itself' if len(drawing) == 1 else 'draw by themselves'}"
            lines.append(f"numbers depend on the micro-batch ({size} sample{'s' * (each > 1)}): {draw}")
        if whole := plan.facts["passes"]:
            size = f"{each}"
            alike = f"the numbers of parallel=single parallel.chunks={pieces}"
            if pieces > 1:
                lines.append(f"{self._named(whole)} over micro-batches of {each}: {alike}")
        if self.has_batchnorm:
            replicas = plan.dp if self.cfg.parallel.sync_batchnorm else 1
            size = f"{each * replicas}" + f" ({each} of each of {replicas} replicas)" * (replicas > 1)
            alike = f"the numbers of parallel=single parallel.chunks={pieces // replicas}"
            if replicas > 1 and plan.chunks > 1:
                alike = f"not {alike}, where other samples meet"
            if pieces > 1:
                lines.append(f"BatchNorm over micro-batches of {size}: {alike}")
        return size, lines

    def _named(self, names: Sequence[str]) -> str:
        """Return a phrase that names layers, and the loss."""
        layers = [name for name in names if name != LOSS]
        named = " and ".join([", ".join(layers[:3]), *[f"{len(layers) - 3} more"] * (len(layers) > 3)])
        who = [f"layer{'s' * (len(layers) > 1)} {named}"] * bool(layers)
        who += [f"the loss {type(self.chain.loss).__name__}"] * (LOSS in names)
        return " and ".join(who)


def data_digest(data: DataSet, splits: Sequence[Source | None] | None = None) -> str:
    """Return a digest of the data: of its text, and of the number of samples and some samples in each split."""
    digest = hashlib.sha256(f"{data.vocab_size} {data.seq_len} {data.fingerprint}".encode())
    for source in (data.train, data.valid, data.test) if splits is None else splits:
        digest.update(f"|{0 if source is None else len(source)}".encode())
        with suppress(DataError):  # a sample that cannot be read is an error when training reads it
            for tensor in _some_samples(source):
                digest.update(_content(tensor))
    return digest.hexdigest()[:_DIGITS]


def _some_samples(source: Source | None) -> list[Tensor]:
    if source is None or len(source) == 0:
        return []
    indices = np.unique(np.linspace(0, len(source) - 1, _SAMPLES).astype(np.int64))
    # Read one by one, so that samples of variable length are not padded to the longest.
    batches = [Batch(*source.read(np.array([index]), 0)) for index in indices]
    return [tensor for batch in batches for tensor in batch.tensors]


def _content(tensor: Tensor) -> bytes:
    """Return a tensor's bytes; for floating-point numbers, rounded means, because the last bits differ by processor."""
    if not tensor.is_floating_point():
        return tensor.numpy().tobytes()
    numbers = tensor.double()
    return f"{tuple(tensor.shape)} {numbers.mean():.3g} {numbers.square().mean():.3g}".encode()
