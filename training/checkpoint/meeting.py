"""What the ranks of a run tell each other about a checkpoint, outside of its files."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather(mesh: Any, value: Any) -> list:
    """Everyone's value, by rank. All ranks call it together."""
    if mesh.size == 1:
        return [value]
    answers: list = [None] * mesh.size
    dist.all_gather_object(answers, value)
    return answers
