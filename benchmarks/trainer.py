"""This project's own training step for a benchmark: configured as on the command line, without loop and records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from conf.schema import register
from data.batch import Batch
from data.loader import TrainBatches
from parallel.build import build_strategy
from parallel.strategy import StepResult
from training.config import to_config, to_dict
from training.optimizer import Optimizer
from training.run import strategy_options
from training.setup import Setup, prepare

# A Transformer whose layers can be dealt to two stages in equal shares: the projection onto its words, most of the work
# of a smaller one, costs as much as two of its eight layers.
TRANSFORMER = (
    "model=transformer", "model.d_model=256", "model.d_hid=1024", "model.n_layer=8", "data.max_vocabulary=6144",
    "data.seq_len=128", "train.grad_clip=null", "optim=sgd", "scheduler=constant",
)  # fmt: skip
KEPT_BATCHES = 2  # read once and used in turn: reading is not what is measured


def configured(overrides: Sequence[str]) -> Setup:
    """What ``python train.py OVERRIDES`` would prepare."""
    register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(Path(__file__).parents[1] / "conf"), version_base="1.3"):
        return prepare(to_config(to_dict(compose("train", list(overrides)))))


class Trainer:
    """One rank's part in one layout.

    rank        in the layout, which may be smaller than the benchmark's two processes
    local_rank  whose GPU it uses; the same, if not given
    """

    def __init__(self, setup: Setup, rank: int = 0, local_rank: int | None = None) -> None:
        cfg = setup.cfg
        self.setup = setup
        mesh = setup.plan.mesh(rank).connect(timeout_s=600.0)
        place = rank if local_rank is None else local_rank
        self.strategy = build_strategy(
            setup.plan, setup.chain, mesh, strategy_options(cfg), setup.sample, place
        )
        self.optimizer = Optimizer(to_dict(cfg.optim), self.strategy)
        batches = TrainBatches(setup.data.train, setup.plan.global_batch_size, cfg.seed, mesh.replica, mesh.dp)
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
