"""The modes that need one process and a checkpoint: ``export`` and ``sample``.

``mode=export`` writes a checkpoint's weights as other programs read them. A model that has a Hugging Face counterpart
(``Chain.hugging_face``) goes under its names, with config.json and the tokenizer, so that ``from_pretrained(folder)``
gives the same logits. Other models are a plain state dict under their own names (ResNet-50's are torchvision's).

``mode=sample`` continues a text with a language model.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file

from common.errors import CheckpointError, TrainingError, UserError
from common.files import atomic_folder
from data.dataset import DataSet
from data.huggingface_tokenizer import tokenizer_files
from data.vocabulary import GPT2Vocabulary
from data.words import WordVocabulary, basic_english
from launchers import World
from models.chain import Chain
from models.generate import generate
from parallel.build import build_strategy
from parallel.devices import share_cores
from parallel.plan import make_plan
from parallel.precision import autocast
from parallel.strategy import Options, Strategy
from training import checkpoint
from training.checkpoint import read_manifest
from training.checkpoint.configuration import check_fits, checkpoint_of
from training.config import to_config, to_dict
from training.reporting.console import describe_sample
from training.setup import model_and_data

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
_SINGLE = {"name": "single", "dp": 1, "pp": 1, "chunks": 1, "stages_per_rank": None, "balance": "uniform"}


def run_alone(cfg: Any, run_dir: Path, world: World | None) -> None:
    """Export or sample, and print the result.

    A checkpoint holds the whole model, so neither ``parallel`` nor ``launcher`` matters.

    Raises:
        TrainingError: Where several processes were started, and as ``export`` and ``sample`` do.
    """
    if world is not None and world.size > 1:
        raise TrainingError(
            f"mode={cfg.mode} is one process and {world.size} were started (WORLD_SIZE): run it as python train.py …"
        )
    print(export(cfg, run_dir) if cfg.mode == "export" else sample(cfg), flush=True)


class Restored(NamedTuple):
    """A checkpoint's whole model in this process.

    Attributes:
        chain: The model.
        data: Its data set, prepared only where the model needed it.
        strategy: The one that holds the weights.
        step: The step after which the checkpoint was saved.
    """

    chain: Chain
    data: DataSet
    strategy: Strategy
    step: int


def restore(cfg: Any, device: str) -> Restored:
    """Build the model that ``cfg`` describes with the weights of its checkpoint, whatever layout has saved it.

    Args:
        cfg: The configuration.
        device: auto, cpu, cuda or mps.

    Raises:
        CheckpointError: Where there is no checkpoint, or one that is damaged or of another model.
    """
    path = checkpoint_of(cfg)
    read_manifest(path)  # before anything takes time
    share_cores(1, cfg.parallel.threads)
    chain, data = model_and_data(cfg)
    check_fits(path, chain, cfg)
    parallel = to_config({**to_dict(cfg.parallel), **_SINGLE, "devices": None})
    plan = make_plan(parallel, chain, global_batch_size=1, device=device, precision=cfg.train.precision)
    strategy = build_strategy(plan, chain, plan.mesh(0), Options(seed=cfg.seed), sample=None)
    return Restored(chain, data, strategy, checkpoint.load(path, strategy))


def export(cfg: Any, run_dir: Path) -> str:
    """Write the checkpoint ``cfg.checkpoint`` to the folder ``cfg.export_to``, which may be relative to ``run_dir``.

    The folder appears complete or not at all.

    Returns:
        A sentence that says what was written.

    Raises:
        TrainingError: For a folder that exists.
        CheckpointError: For a checkpoint that cannot be read, or a folder that cannot be written.
    """
    folder = _export_folder(run_dir, cfg.export_to)
    restored = restore(cfg, "cpu")
    vocabulary, state, texts = restored.data.vocabulary, restored.strategy.state_dict(), {}
    if restored.chain.hugging_face is not None:
        state, config = restored.chain.hugging_face.export(state, restored.data.vocab_size)
        texts["config.json"] = json.dumps(config, indent=1)
    if isinstance(vocabulary, GPT2Vocabulary):
        texts |= tokenizer_files(vocabulary.extra, restored.chain.limits["positions"])
    elif vocabulary is not None:
        restored.data.prepare()
        texts["vocabulary.txt"] = "\n".join(vocabulary.words) + "\n"
    try:
        with atomic_folder(folder) as draft:
            # transformers refuses a file without this metadata
            save_file({k: v.contiguous() for k, v in state.items()}, draft / WEIGHTS, metadata={"format": "pt"})
            for name, text in texts.items():
                (draft / name).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} could not be written: {error}") from error
    return f"exported {cfg.model.name} after step {restored.step} to {folder}: {', '.join([WEIGHTS, *texts])}"


def _export_folder(run_dir: Path, name: str) -> Path:
    folder = Path(run_dir).absolute() / Path(name).expanduser()
    if folder.exists():
        raise TrainingError(f"{folder} exists already; choose another export_to=")
    return folder


def sample(cfg: Any) -> str:
    """Continue ``sample.prompt`` by ``sample.tokens`` tokens.

    Returns:
        The prompt and its continuation.

    Raises:
        TrainingError: For a model that is not a language model, and for numbers that make no sense, before anything is
            loaded.
        CheckpointError: For a checkpoint that cannot be read.
    """
    _check_sample(cfg)
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
            positions=restored.chain.limits.get("positions"),
            vocab_size=min(vocabulary.size, restored.chain.limits["vocabulary"]),
            temperature=cfg.sample.temperature,
            top_k=cfg.sample.top_k,
            seed=cfg.seed,
            device=strategy.device,
        )
    return vocabulary.decode([*tokens, *drawn])


def closing_sample(cfg: Any, run_dir: Path) -> str:
    """Draw ``sample.at_end`` tokens from the model that a run has trained, for the end of its console.

    Returns:
        The text, set off from the results; empty where the run has no checkpoint or its model writes no text.
    """
    wanted = "vocab_size" in cfg.model and cfg.sample.at_end > 0 and cfg.train.checkpoint_every is not None
    if not wanted:
        return ""
    again = to_config({**to_dict(cfg), "mode": "sample", "checkpoint": str(run_dir)})
    again.sample.tokens = cfg.sample.at_end
    if cfg.data.get("vocabulary") == "words" and not cfg.sample.prompt:
        again.sample.prompt = "the"  # words have no token that marks the beginning of a text
    try:
        return describe_sample(sample(again)) + "\n"
    except UserError as error:  # the run itself has succeeded
        logger.warning("no sample of the model's text: %s", error)
        return ""


def _check_sample(cfg: Any) -> None:
    if "vocab_size" not in cfg.model:
        raise TrainingError(
            f"mode=sample prints text, and model={cfg.model.name} is no language model (it has no model.vocab_size)"
        )
    settings = cfg.sample
    if settings.tokens < 1:
        raise TrainingError(f"sample.tokens={settings.tokens} must be at least 1")
    if not 0 <= settings.temperature < float("inf"):
        raise TrainingError(f"sample.temperature={settings.temperature} must be 0 (always the likeliest) or above")
    if settings.top_k is not None and settings.top_k < 1:
        raise TrainingError(f"sample.top_k={settings.top_k} must be at least 1, or null for all tokens")


def _encode(vocabulary: GPT2Vocabulary | WordVocabulary, prompt: str) -> list[int]:
    (tokens,) = vocabulary.encode_texts([prompt])
    if not tokens and vocabulary.start is None:
        raise TrainingError('a model of words needs some to continue: sample.prompt="def the"')
    if vocabulary.words is not None:
        known = set(vocabulary.words)
        unknown = sorted({word for word in basic_english(prompt) if word not in known})
        if unknown:
            logger.warning("not among the model's words, read as <unk>: %s", " ".join(unknown))
    return tokens
