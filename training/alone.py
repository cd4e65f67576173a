"""A checkpoint's whole model in this one process, whatever layout has saved it."""

from __future__ import annotations

from typing import Any, NamedTuple

from data.dataset import DataSet
from models.chain import Chain
from parallel.build import build_strategy
from parallel.devices import share_cores
from parallel.plan import make_plan
from parallel.strategy import Options, Strategy
from training import checkpoint
from training.checkpoint import read_manifest
from training.config import to_config, to_dict
from training.modes import checkpoint_of
from training.setup import model_and_data

_ALONE = {"name": "single", "dp": 1, "pp": 1, "chunks": 1, "stages_per_rank": None, "balance": "uniform"}


class Restored(NamedTuple):
    """``step``: the one after which the checkpoint was saved."""

    chain: Chain
    data: DataSet
    strategy: Strategy
    step: int


def restore(cfg: Any, device: str) -> Restored:
    """The model that ``cfg`` describes with the weights of its checkpoint, on ``device`` (auto | cpu | cuda | mps).

    Raises CheckpointError where the checkpoint is none, damaged, or of another model.
    """
    path = checkpoint_of(cfg)
    read_manifest(path)  # before anything takes time
    share_cores(1, cfg.parallel.threads)
    chain, data = model_and_data(cfg)
    parallel = to_config({**to_dict(cfg.parallel), **_ALONE, "devices": None})
    plan = make_plan(parallel, chain, global_batch_size=1, device=device, precision=cfg.train.precision)
    strategy = build_strategy(plan, chain, plan.mesh(0), Options(seed=cfg.seed), sample=None)
    return Restored(chain, data, strategy, checkpoint.load(path, strategy))
