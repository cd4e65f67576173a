"""mode=sample: continue texts with a language model."""

from __future__ import annotations

import logging
from pathlib import Path
from textwrap import indent

from common.errors import TrainingError, UserError
from conf.composition import Composed
from conf.instantiate import with_values
from conf.schema import Root
from data.dataset import DataSet
from data.vocabulary import Vocabulary
from data.words import WordVocabulary, basic_english
from launchers import stopping
from training.command.app import check_alone
from training.reporting.metrics import SUMMARY, read_object
from training.run.restore import continued, restore

logger = logging.getLogger(__name__)

_BETWEEN = "\n" + 20 * "-" + "\n"  # separates the texts of several prompts


def run(composed: Composed) -> None:
    """Sample in one process. A checkpoint contains the whole model, so ``parallel`` and ``launcher`` do not matter."""
    check_alone(composed)
    stopping.at_once()
    print(sample(composed.cfg), flush=True)


def sample(cfg: Root) -> str:
    """Continue ``sample.prompt``, or each of ``sample.prompts``, by ``sample.tokens`` tokens.

    Returns:
        The prompt and its continuation. A line of dashes separates the texts of several prompts.

    Raises:
        TrainingError: The model is not a language model, or a number of ``sample`` is out of range. This is raised
            before anything is loaded.
        CheckpointError: The checkpoint cannot be read.
    """
    _check_sample(cfg)
    restored = restore(cfg, cfg.device)
    vocabulary = restored.data.vocabulary
    if vocabulary is None:
        raise TrainingError(f"data.vocab_size={restored.data.vocab_size}: an unknown vocabulary, which has no text")
    if isinstance(vocabulary, WordVocabulary):
        restored.data.prepare()  # it reads the words
    settings = cfg.sample
    prompts = [settings.prompt] if settings.prompts is None else settings.prompts
    encoded = [_encode(restored.data, vocabulary, prompt) for prompt in prompts]
    start = [] if vocabulary.end is None else [vocabulary.end]  # without one, _encode refuses an empty prompt
    drawn = continued(cfg, restored, [tokens or start for tokens in encoded])
    return _BETWEEN.join(vocabulary.decode([*pair[0], *pair[1]]) for pair in zip(encoded, drawn, strict=True))


def closing_sample(cfg: Root, run_dir: Path, entropy: float | None) -> str:
    """Draw ``sample.at_end`` tokens from the model that a run has trained, for the end of its console.

    ``entropy`` is the unigram entropy of its data in nats; None if it is unknown.

    Returns:
        The text; empty if the run has no checkpoint or its model writes no text. If the loss is above the unigram
        entropy, the model would write random words: then this is a line that says so.
    """
    if "vocab_size" not in cfg.model or cfg.sample.at_end <= 0 or cfg.train.checkpoint_every is None:
        return ""
    summary = read_object(run_dir / SUMMARY)
    loss = summary.get("best_val_loss") or summary.get("final_loss")
    if entropy is not None and loss is not None and loss > entropy:
        return f"no sample of its text yet: its loss of {loss:.3f} is above the unigram entropy, {entropy:.3f}\n"
    values = {"mode": "sample", "checkpoint": str(run_dir), "sample.tokens": cfg.sample.at_end}
    if cfg.data.get("vocabulary") == "words" and not cfg.sample.prompt:
        values["sample.prompt"] = "the"  # words have no token that marks the beginning of a text
    try:
        return f"a sample of its text:\n{indent(sample(with_values(cfg, values)).strip(), '  ')}\n"
    except Exception as error:  # the run itself has succeeded, and the user's model may be unable to continue texts
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        logger.warning("no sample of the model's text: %s", reason)
        return ""


def _check_sample(cfg: Root) -> None:
    if "vocab_size" not in cfg.model:
        raise TrainingError(f"mode=sample prints text, but model={cfg.model.name} is not a language model")
    settings = cfg.sample
    if settings.tokens < 1:
        raise TrainingError(f"sample.tokens={settings.tokens} must be at least 1")
    if not 0 <= settings.temperature < float("inf"):
        raise TrainingError(f"sample.temperature={settings.temperature} must be 0 (always the likeliest) or above")
    if settings.top_k is not None and settings.top_k < 1:
        raise TrainingError(f"sample.top_k={settings.top_k} must be at least 1, or null for all tokens")
    if not 0 < settings.top_p <= 1:
        raise TrainingError(f"sample.top_p={settings.top_p} must lie in (0, 1]; 1 draws among all tokens")
    if settings.prompts is not None and (settings.prompt or not settings.prompts):
        problem = "and sample.prompt are both set" if settings.prompt else "is empty"
        raise TrainingError(f"""sample.prompts {problem}; write sample.prompts=["def main", "class A"] alone""")
    for prompt in [settings.prompt] if settings.prompts is None else settings.prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise TrainingError(
                f"the prompt {prompt!a} is not text: it contains half of a character, or a byte that is not UTF-8, as "
                "a terminal in Latin-1 sends it; type it in UTF-8"
            ) from None


def _encode(data: DataSet, vocabulary: Vocabulary | WordVocabulary, prompt: str) -> list[int]:
    (tokens,) = data.encode_prompts([prompt])
    if not tokens and vocabulary.end is None:
        raise TrainingError('a model of words needs some to continue: sample.prompt="def the"')
    if isinstance(vocabulary, WordVocabulary):
        known = set(vocabulary.words)
        unknown = sorted({word for word in basic_english(prompt) if word not in known})
        if unknown:
            logger.warning("not among the model's words, read as <unk>: %s", " ".join(unknown))
    return tokens
