"""Loads the whole model of a checkpoint of any layout into this process."""

from __future__ import annotations

from typing import NamedTuple

from conf.schema import Root
from data.dataset import DataSet
from parallel.devices import share_cores
from parallel.planning import make_plan
from parallel.strategy import Options, Strategy, build_strategy
from training.checkpoint.configuration import checkpoint_of
from training.checkpoint.init_from import start, with_base
from training.checkpoint.load import check_fits, load
from training.run.prepare import in_one_process, model_and_data


class Restored(NamedTuple):
    """The whole model of a checkpoint, in this process.

    Attributes:
        data: The model's data set, prepared only if the model needs it.
        strategy: The strategy of one process, with the loaded weights.
        step: The step after which the checkpoint was saved.
    """

    data: DataSet
    strategy: Strategy
    step: int


def restore(cfg: Root, device: str) -> Restored:
    """Build the model that ``cfg`` describes, and load the weights of its checkpoint, which may have any layout.

    Raises:
        CheckpointError: The checkpoint does not exist, is damaged, or belongs to another model.
    """
    path = checkpoint_of(cfg)
    share_cores(1, cfg.parallel.threads)
    cfg, chain, data = model_and_data(cfg)
    check_fits(path, chain, cfg)
    with_base(cfg, chain)  # raises if the base differs
    parallel = in_one_process(cfg).parallel
    plan = make_plan(parallel, chain, global_batch_size=1, device=device, precision=cfg.train.precision)
    strategy = build_strategy(plan, chain, plan.mesh(0), Options(seed=cfg.seed), sample=None)
    if chain.base is not None:
        start(cfg.model, chain, strategy)
    return Restored(data, strategy, load(path, strategy).step)
