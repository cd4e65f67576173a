"""This project's own training step for a benchmark: configured as on the command line, without loop and records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from conf.schema import register
from data.batch import Batch
from data.loader import TrainBatches
from models.chain import Chain
from parallel.build import build_strategy
from parallel.partition import block_partition
from parallel.strategy import Options, StepResult
from training.config import attributes, plain
from training.optimizer import Optimizer
from training.setup import Setup, prepare

KEPT_BATCHES = 2  # read once and used in turn: reading is not what is measured


def configured(overrides: Sequence[str]) -> Setup:
    """What ``python train.py OVERRIDES`` would prepare."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        return prepare(attributes(plain(compose("train", list(overrides)))))


class Trainer:
    """One rank's part in one layout. ``setup.plan`` may take fewer processes than there are ranks: then the first ones
    build it and the others do not."""

    def __init__(self, setup: Setup, rank: int = 0) -> None:
        cfg = setup.cfg
        self.setup = setup
        mesh = setup.plan.mesh(rank).connect(timeout_s=600.0)
        options = Options(
            seed=cfg.seed,
            bucket_mb=cfg.parallel.bucket_mb,
            comm_hook=cfg.parallel.comm_hook,
            compile=cfg.train.compile,
        )
        self.strategy = build_strategy(setup.plan, setup.chain, mesh, options, setup.sample, rank)
        self.optimizer = Optimizer(plain(cfg.optim), self.strategy)
        batches = TrainBatches(
            setup.data.train, setup.plan.global_batch_size, cfg.seed, mesh.replica, mesh.dp
        )
        self._batches = [batches[number] for number in range(1, KEPT_BATCHES + 1)]

    def batch(self, number: int) -> Batch:
        """This replica's batch of step ``number``."""
        return self._batches[(number - 1) % KEPT_BATCHES]

    def step(self, number: int) -> StepResult:
        """Forward, backward, what ranks agree on, and the update; done on the device too when it returns."""
        result = self.strategy.train_step(self.batch(number), number)
        self.optimizer.step(self.optimizer.base_lr)
        wait_for(self.strategy.device)
        return result

    def close(self) -> None:
        self.strategy.close()


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def balance_by_time(chain: Chain, batch: Batch, parts: int = 2, repeats: int = 3) -> list[int]:
    """How many layers each of ``parts`` gets, from the time that each layer's forward and backward takes here.

    batch  one micro-batch; the fastest of ``repeats`` counts
    """
    layers = chain.build(chain.names, 0, torch.device("cpu"))
    if chain.channels_last:
        layers.to(memory_format=torch.channels_last)
    seconds = [float("inf")] * len(chain.names)
    for _ in range(repeats):
        x = batch.inputs
        for index, (name, layer) in enumerate(layers.items()):
            x = x.detach().requires_grad_(x.is_floating_point())
            start = time.perf_counter()
            if name == chain.names[-1]:
                _close(chain, layer, x, batch.targets).backward()
            else:
                y = layer(x)
                y.backward(torch.ones_like(y))
                x = y
            seconds[index] = min(seconds[index], time.perf_counter() - start)
    return block_partition(seconds, parts)


def _close(chain: Chain, layer: torch.nn.Module, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if hasattr(layer, "loss"):
        return layer.loss(x, targets, None).loss
    return chain.loss(layer(x), targets, None).loss
