"""Text from a language model, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.chain import Layers


@torch.no_grad()
def generate(
    layers: Layers,
    tokens: Sequence[int],
    count: int,
    *,
    positions: int | None,
    vocab_size: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Draw ``count`` tokens that follow ``tokens``.

    Args:
        layers: The whole model in evaluation mode: tokens [1, t] -> logits [1, t, at least vocab_size].
        tokens: Token ids to continue, one at least.
        count: Number of tokens to draw.
        positions: The model sees at most this many of the newest tokens. None: all.
        vocab_size: Only tokens below it are drawn (the model's vocabulary may be padded).
        temperature: Logits are divided by it; 0: the likeliest token, always.
        top_k: Draw among this many of the likeliest tokens; None: all.
        seed: Of the draws, which are made on the CPU: the same on every device that computes the same logits.
        device: Where the model is.

    Returns:
        The drawn token ids.
    """
    generator = torch.Generator().manual_seed(seed)
    *body, (_, head) = layers.items()
    text = list(tokens)
    for _ in range(count):
        x = torch.tensor([text if positions is None else text[-positions:]], device=device)
        for _, layer in body:
            x = layer(x)
        logits = head(x[:, -1:])[0, 0, :vocab_size].float().cpu()
        text.append(_draw(logits, temperature, top_k, generator))
    return text[len(tokens) :]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The largest is 0 then, so that no temperature makes them overflow.
    probabilities = torch.softmax((logits - logits.max()) / temperature, dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
