"""Text from a language model, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention import KeyValueCache, caching
from models.chain import Layers, as_tuple
from models.seeds import derive_seed


@dataclass(frozen=True)
class Draws:
    """How a token is drawn.

    Attributes:
        temperature: Logits are divided by it; 0: always the likeliest token.
        top_k: Draw among this many of the likeliest tokens; None: all.
        top_p: Of the tokens that ``top_k`` leaves, draw among the smallest set of the likeliest tokens with this total
            probability, in (0, 1].
        seed: The seed. Tokens are drawn on the CPU, so that equal logits give equal tokens on every device.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


@torch.no_grad()
def generate(
    layers: Layers,
    prompts: Sequence[Sequence[int]],
    count: int,
    draws: Draws,
    *,
    positions: int | None,
    vocab_size: int,
    device: torch.device,
    cached: bool = False,
) -> list[list[int]]:
    """Draw ``count`` tokens that follow each of the prompts, which have at least one token.

    A prompt's tokens do not depend on the prompts after it, nor on whether keys and values are kept.

    Args:
        layers: The whole model in evaluation mode: tokens [b, t] -> logits [b, t, at least vocab_size]. If it returns a
            tuple, the first tensor is used.
        prompts: Token ids.
        count: Number of tokens.
        draws: How tokens are drawn. Each prompt has its own generator.
        positions: The model sees at most this many of the newest tokens. None: all.
        vocab_size: Only tokens below it are drawn (the model's vocabulary may be padded).
        device: The device of the model.
        cached: Whether keys and values are kept. The model must support it (``Chain.continues``). They are kept until
            the longest text exceeds ``positions``: from then on, each new token changes the positions of all tokens.
    """
    texts = [list(prompt) for prompt in prompts]
    longest = max(map(len, texts)) + count
    limit = longest if positions is None else positions
    cache = KeyValueCache(min(longest, limit)) if cached else None
    generators = [torch.Generator().manual_seed(derive_seed(draws.seed, i)) for i in range(len(texts))]
    for _ in range(count):
        if max(map(len, texts)) > limit:
            cache = None
        seen = limit
        if cache is not None and not cache.empty:
            cache.advance([len(text) - 1 for text in texts], device)
            seen = 1
        with caching(layers, cache):
            logits = _logits(layers, [text[-seen:] for text in texts], device)
        logits = logits[:, :vocab_size].float().cpu()
        for text, row, generator in zip(texts, logits, generators, strict=True):
            text.append(draw(row, draws, generator))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def logits_at(layers: Layers, tokens: Tensor, texts: Tensor | slice, last: Sequence[int] | int) -> Tensor:
    """Return the logits [texts, vocabulary] of some ``texts`` among tokens [b, t], at the position ``last`` of each."""
    *body, (_, head) = layers.items()
    tensors = as_tuple(tokens)
    for _, layer in body:
        tensors = as_tuple(layer(*tensors))
    if body and len(tensors) == 1:  # the last layer is the most expensive one, and one position is enough
        return as_tuple(head(tensors[0][texts, last][:, None]))[0][:, 0]
    return as_tuple(head(*tensors))[0][texts, last]


def _logits(layers: Layers, texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the logits [b, vocabulary] after the last token of each text. Shorter texts are padded at the end."""
    last = [len(text) - 1 for text in texts]
    x = torch.tensor([[*text, *[0] * (max(last) + 1 - len(text))] for text in texts], device=device)
    return logits_at(layers, x, torch.arange(len(texts)), last)


def draw(logits: Tensor, draws: Draws, generator: torch.Generator) -> int:
    """Draw one token from its logits [vocabulary]."""
    if draws.temperature == 0:
        return int(logits.argmax())
    if draws.top_k is not None and draws.top_k < len(logits):
        least = logits.topk(draws.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The largest logit becomes 0, so that none overflows at any temperature.
    probabilities = torch.softmax((logits - logits.max()) / draws.temperature, dim=0)
    if draws.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True)
        likelier = ordered.cumsum(0) - ordered  # the sum over the tokens before each
        probabilities[tokens[likelier >= draws.top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
