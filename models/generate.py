"""Text from a language model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import KeyValueCache, UsesCache, caching
from models.chain import Layers, as_tuple
from models.seeds import derive_seed


@dataclass(frozen=True)
class Draws:
    """The settings for drawing a token.

    Attributes:
        temperature: The divisor of the logits. 0 always draws the most likely token.
        top_k: The number of most likely tokens to draw from; None for all tokens.
        top_p: The total probability, in (0, 1], of the most likely tokens to draw from. The smallest set of most likely
            tokens with this probability is used, among the tokens that ``top_k`` leaves.
        seed: The seed. Tokens are drawn on the CPU, so equal logits give equal tokens on every device.
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
    end: int | None = None,
    first: int = 0,
) -> list[list[int]]:
    """Draw ``count`` tokens that follow each prompt. Each prompt has at least one token.

    A prompt's tokens do not depend on the prompts after it, nor on whether keys and values are cached.

    Args:
        layers: The whole model in evaluation mode: tokens [b, t] -> logits [b, t, at least vocab_size]. If it returns a
            tuple, the first tensor is used.
        prompts: Token ids.
        count: The number of tokens.
        draws: The settings for drawing. Each prompt has its own generator.
        positions: The maximum number of newest tokens that the model sees; None for all tokens.
        vocab_size: The number of tokens to draw from; larger ids are never drawn (the model's vocabulary may be
            padded).
        device: The device of the model.
        cached: Whether keys and values are cached. The model must support it (``Chain.continues``). They are cached
            until the longest text exceeds ``positions``. From then on, each new token changes the positions of all
            tokens.
        end: A token after which nothing is needed: if all texts have drawn it, no further tokens are drawn.
        first: The number of the first prompt among those that share a seed.
    """
    texts = [list(prompt) for prompt in prompts]
    longest = max(map(len, texts)) + count
    limit = longest if positions is None else positions
    cache = KeyValueCache(min(longest, limit)) if cached else None
    users = [layer for layer in layers.modules() if isinstance(layer, UsesCache)]
    generators = [torch.Generator().manual_seed(derive_seed(draws.seed, first + i)) for i in range(len(texts))]
    with _by_onednn(layers):
        for _ in range(count):
            if max(map(len, texts)) > limit:
                cache = None
            seen = limit
            if cache is not None and not cache.empty:
                cache.advance([len(text) - 1 for text in texts], device)
                seen = 1
            with caching(users, cache):
                logits = _logits(layers, [text[-seen:] for text in texts], device)
            logits = logits[:, :vocab_size].float().cpu()
            for text, row, generator in zip(texts, logits, generators, strict=True):
                text.append(draw(row, draws, generator))
            if end is not None and all(end in text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)):
                break
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def logits_at(layers: Layers, tokens: Tensor, texts: Tensor | slice, last: Sequence[int] | int) -> Tensor:
    """Return the logits [texts, vocabulary] of some ``texts`` among tokens [b, t], each at its position ``last``."""
    *body, (_, head) = layers.items()
    tensors = as_tuple(tokens)
    for _, layer in body:
        tensors = as_tuple(layer(*tensors))
    if body and len(tensors) == 1:  # the last layer is the most expensive one, and one position is enough
        return as_tuple(head(tensors[0][texts, last][:, None]))[0][:, 0]
    return as_tuple(head(*tensors))[0][texts, last]


@contextmanager
def _by_onednn(layers: nn.Module) -> Iterator[None]:
    """Let large linear layers on a CPU multiply a few rows with oneDNN, up to 2.5 times as fast as with MKL on AMD.

    torch itself calls oneDNN for bf16 only. Its operator for float32 is private; tried with torch 2.13.
    """
    available = torch.backends.mkldnn.is_available() and not torch.is_autocast_enabled("cpu")
    large = [
        layer
        for layer in layers.modules()
        if available and type(layer) is nn.Linear and "forward" not in vars(layer) and _is_large(layer)
    ]
    for layer in large:
        layer.forward = partial(_multiply, layer)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for layer in large:
            del layer.forward


def _is_large(layer: nn.Linear) -> bool:
    weight, bias = layer.weight, layer.bias
    dense = bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous())  # oneDNN ignores a bias's stride
    return dense and weight.device.type == "cpu" and weight.dtype is torch.float32 and weight.numel() >= 2**18


def _multiply(layer: nn.Linear, x: Tensor) -> Tensor:
    if x.dtype is torch.float32 and x.numel() <= 32 * x.shape[-1]:
        return torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
    return F.linear(x, layer.weight, layer.bias)


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
    # The largest logit becomes 0, so that no logit overflows at any temperature.
    probabilities = torch.softmax((logits - logits.max()) / draws.temperature, dim=0)
    if draws.top_p < 1:
        ordered, tokens = probabilities.sort(descending=True)
        likelier = ordered.cumsum(0) - ordered  # for each token, the sum over the tokens before it
        probabilities[tokens[likelier >= draws.top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
