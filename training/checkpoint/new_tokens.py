"""``model.extra_tokens``: GPT-2's vocabulary grown, and what the new rows start as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.errors import TrainingError
from data.vocabulary import GPT2_VOCAB_SIZE, gpt2, parse_extra_tokens
from models.chain import Chain
from parallel.sharding import fill, whole
from parallel.strategy import Strategy

_PADDED_TO = 128
_BLOCK = 4096  # rows summed at a time: a float64 copy of a whole embedding would be twice its size


def grown(vocab_size: int, extra_tokens: Any) -> int:
    """The size of the model's vocabulary with the extra tokens, whose ids begin at 50,257.

    They take padding where there is some; a vocabulary that was padded to a multiple of 128 stays one.

    Args:
        vocab_size: The model's vocabulary without them.
        extra_tokens: The section's value (see ``data.vocabulary.parse_extra_tokens``).

    Raises:
        TrainingError: Where the model lacks some of GPT-2's own tokens.
    """
    extra = parse_extra_tokens(extra_tokens)
    if not extra:
        return vocab_size
    if vocab_size < GPT2_VOCAB_SIZE:
        raise TrainingError(
            f"model.extra_tokens stand behind GPT-2's {GPT2_VOCAB_SIZE} tokens, model.vocab_size={vocab_size} is less; "
            f"set model.vocab_size={GPT2_VOCAB_SIZE} or more"
        )
    wanted = GPT2_VOCAB_SIZE + len(extra)
    step = _PADDED_TO if vocab_size % _PADDED_TO == 0 else 1
    return max(vocab_size, -(-wanted // step) * step)


def add_tokens(extra_tokens: Any, chain: Chain, strategy: Strategy, known: int = 0) -> None:
    """Set the new tokens' rows in every copy of the embedding that this rank holds.

    Each is the mean of the rows of its description's tokens, or of all of GPT-2's where it has none.

    Args:
        extra_tokens: The section's value.
        chain: The model.
        strategy: Whose parameters to change.
        known: How many of the tokens, the first ones, have their rows already.
    """
    extra = parse_extra_tokens(extra_tokens)
    if len(extra) == known:
        return
    sources = [None if words is None else gpt2().encode_ordinary(words) for words in extra.values()]
    for name, parameter in strategy.named_parameters():
        if name == chain.embedding:
            rows = whole(parameter.detach(), strategy.mesh.inner_group)
            fill_new_rows(rows, GPT2_VOCAB_SIZE, sources, known)
            fill(parameter, rows, name)


@torch.no_grad()
def fill_new_rows(weight: Tensor, vocab_size: int, sources: Sequence[Sequence[int] | None], known: int = 0) -> None:
    """Set the rows of an embedding from ``vocab_size`` on, in place, one for each of ``sources``.

    Means are computed in float64 on the CPU, so that copies on other ranks and devices get the same numbers.

    Args:
        weight: [rows, width].
        vocab_size: Number of rows that the vocabulary had before.
        sources: For each new word the rows below ``vocab_size`` whose mean it starts as; None: all of them.
        known: How many of the new words, the first ones, have their rows already.
    """
    everything = None
    for i, rows in enumerate(sources[known:], start=known):
        if rows is None:
            everything = _mean(weight[:vocab_size]) if everything is None else everything
            mean = everything
        else:
            mean = _mean(weight[torch.tensor(rows, device=weight.device)])
        weight[vocab_size + i] = mean.to(weight)


def _mean(rows: Tensor) -> Tensor:
    total = sum(block.cpu().double().sum(dim=0) for block in rows.split(_BLOCK))
    return total / len(rows)
