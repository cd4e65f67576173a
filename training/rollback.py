"""Going back to the newest checkpoint's weights in the middle of a run."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from parallel.strategy import Strategy
from training import checkpoint
from training.optimizer import Optimizer


def roll_back(folder: Path, strategy: Strategy, optimizer: Optimizer) -> str:
    """Load weights and optimizer from the newest checkpoint in ``folder``; returns what was done, in words.

    All ranks call it together, and the caller goes on with its next step: the batches in between are behind it.
    """
    # One rank looks: others may see another state of a shared folder.
    found = [checkpoint.newest(folder) if strategy.mesh.rank == 0 else None]
    if strategy.mesh.size > 1:
        dist.broadcast_object_list(found)
    if found[0] is None:
        return "the loss keeps jumping, and there is no checkpoint yet to go back to (train.checkpoint_every)"
    done = checkpoint.load(found[0], strategy, optimizer)
    return f"the loss keeps jumping: back to the weights of step {done}, and on with the next batches"
