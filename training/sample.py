"""mode=sample: text from a language model's checkpoint."""

from __future__ import annotations

import logging
from typing import Any

from common.errors import TrainingError
from data.vocabulary import GPT2Vocabulary
from data.words import WordVocabulary, basic_english
from models.generate import generate
from parallel.precision import autocast
from training.alone import restore

logger = logging.getLogger(__name__)


def sample(cfg: Any) -> str:
    """``sample.prompt`` and what the model makes of it.

    Raises TrainingError, before anything is loaded, for a model of something else than text and for numbers that make
    no sense.
    """
    _check(cfg)
    restored = restore(cfg, cfg.device)
    vocabulary, strategy = restored.data.vocabulary, restored.strategy
    if vocabulary is None:
        raise TrainingError(
            f"the tokens of this data set are of an unknown vocabulary (data.vocab_size={restored.data.vocab_size}), "
            "so they cannot be shown as text"
        )
    if isinstance(vocabulary, WordVocabulary):
        restored.data.prepare()  # which reads the words
    tokens = _encode(vocabulary, cfg.sample.prompt)
    (stage,) = strategy.stages
    stage.eval()
    with autocast(strategy.plan.precision, strategy.device.type):
        drawn = generate(
            stage.layers,
            tokens or [vocabulary.start],
            cfg.sample.tokens,
            positions=restored.chain.limits["positions"],
            vocab_size=min(vocabulary.size, restored.chain.limits["vocabulary"]),
            temperature=cfg.sample.temperature,
            top_k=cfg.sample.top_k,
            seed=cfg.seed,
            device=strategy.device,
        )
    return vocabulary.decode([*tokens, *drawn])


def _check(cfg: Any) -> None:
    if "vocabulary" not in cfg.model:
        raise TrainingError(
            f"mode=sample prints text, and model={cfg.model.name} is no language model; model=gpt2 and "
            "model=transformer are"
        )
    asked = cfg.sample
    if asked.tokens < 1:
        raise TrainingError(f"sample.tokens={asked.tokens} must be at least 1")
    if not 0 <= asked.temperature < float("inf"):
        raise TrainingError(f"sample.temperature={asked.temperature} must be 0 (always the likeliest) or above")
    if asked.top_k is not None and asked.top_k < 1:
        raise TrainingError(f"sample.top_k={asked.top_k} must be at least 1, or null for all tokens")


def _encode(vocabulary: GPT2Vocabulary | WordVocabulary, prompt: str) -> list[int]:
    (tokens,) = vocabulary.encode_texts([prompt])
    if not tokens and vocabulary.start is None:
        raise TrainingError('a model of words needs some to go on from: sample.prompt="def the"')
    if vocabulary.words is not None:
        known = set(vocabulary.words)
        unknown = sorted({word for word in basic_english(prompt) if word not in known})
        if unknown:
            logger.warning("not among the model's words, read as <unk>: %s", " ".join(unknown))
    return tokens
