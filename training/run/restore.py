"""Loads the whole model of a checkpoint of any layout into this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from conf.schema import Root
from data.dataset import DataSet
from models.generate import Draws, generate
from parallel.devices import autocast, share_cores
from parallel.planning import make_plan
from parallel.strategy import Options, Strategy, build_strategy
from training.checkpoint.configuration import checkpoint_of
from training.checkpoint.init_from import not_drawn, start, with_base
from training.checkpoint.load import check_fits, load, names_in
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


def restore(cfg: Root, device: str, batch: int = 1) -> Restored:
    """Build the model that ``cfg`` describes, and load the weights of its checkpoint, which may have any layout.

    Evaluations have batches of ``batch`` samples.

    Raises:
        CheckpointError: The checkpoint does not exist, is damaged, or belongs to another model.
    """
    path = checkpoint_of(cfg)
    share_cores(1, cfg.parallel.threads)
    cfg, chain, data = model_and_data(cfg)
    check_fits(path, chain, cfg)
    with_base(cfg, chain)  # raises if the base differs
    parallel = in_one_process(cfg).parallel
    plan = make_plan(parallel, chain, global_batch_size=batch, device=device, precision=cfg.train.precision)
    drawn = not_drawn(names_in(path), chain)
    strategy = build_strategy(plan, drawn, plan.mesh(0), Options(seed=cfg.seed), sample=None)
    if chain.unsaved:
        start(cfg.model, chain, strategy)
    return Restored(data, strategy, load(path, strategy).step)


def continued(
    cfg: Root, restored: Restored, prompts: Sequence[Sequence[int]], end: int | None = None, first: int = 0
) -> list[list[int]]:
    """Draw ``sample.tokens`` tokens that follow each prompt, by the other settings of ``sample``; see ``generate``."""
    settings, strategy, size = cfg.sample, restored.strategy, restored.data.vocab_size
    assert size is not None  # the data are texts
    (stage,) = strategy.stages
    stage.eval()
    seed = cfg.seed if settings.seed is None else settings.seed
    with autocast(strategy.plan.precision, strategy.device.type):
        return generate(
            stage.layers,
            prompts,
            settings.tokens,
            Draws(settings.temperature, settings.top_k, settings.top_p, seed),
            positions=strategy.chain.limits.get("positions"),
            vocab_size=min(size, strategy.chain.limits.get("vocabulary", size)),
            device=strategy.device,
            cached=settings.cache and strategy.chain.continues,
            end=end,
            first=first,
        )
