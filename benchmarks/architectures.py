"""``model=transformers``: architectures of transformers under every strategy, and their speed beside its own models.

    python -m benchmarks architectures [layouts] [speed] [--rounds 10] [--quick]

layouts: a random, tiny model of each kind, in layouts of up to four processes with each strategy that cuts something,
compared with one process as ``mode=verify`` compares: losses, metrics, gradients, weights, optimizer, evaluation, a
step from another layout's checkpoint. In fp64; a kind that cannot be cut says why.

speed: a step of a small model on one core, fp32, in turns with the same step by hand: transformers' own model, its
logits, torch's cross entropy, clipping and AdamW; and, for a model that ``model=llama`` or ``model=gpt2`` has too, with
that. Seconds are those of the CPU; ratios are medians over rounds.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.table import Benchmark, Table
from benchmarks.timing import paired, take_turns
from benchmarks.trainer import PlainLoop, Trainer, adamw, composed, token_loss
from common.errors import UserError
from common.packages import load_transformers
from launchers.local import start_fork_server
from parallel.layout import Layout
from training.run.prepare import prepare
from training.studies.verification.layouts import OWN, Compared, Runs

PARTS = ("layouts", "speed")
MICROBATCHES = 4
LAYOUTS = [
    Layout("ddp", dp=2, chunks=2),
    Layout("pipelined", pp=2, chunks=4, schedule="1f1b"),
    Layout("fsdp", dp=2, chunks=2),
    Layout("pipe_fsdp", dp=2, pp=2, chunks=2, schedule="1f1b"),
    Layout("tensor", tp=2, chunks=4),
    Layout("tensor", tp=2, chunks=4, sequence=True),
]
# By the names of several families; a configuration gets those that it has.
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 128,
    "max_position_embeddings": 64, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "head_dim": 16, "attention_dropout": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "hidden_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SMALL = TINY | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "n_embd": 256, "n_layer": 4,
    "vocab_size": 1024, "max_position_embeddings": 128, "n_positions": 128, "moe_intermediate_size": 128,
    "head_dim": 64,
}  # fmt: skip
_WINDOWS = {"sliding_window": 8}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": _WINDOWS,
    "gemma": {},
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "phi3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.2},
    "starcoder2": {},
    "stablelm": {},
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {},
    "smollm3": {},
    "cohere": {"logit_scale": 0.25},
    "gpt2": {},
    "mixtral": {},
    "qwen3_moe": {},
    "olmoe": {},
    "gpt_oss": _WINDOWS,
}
REFUSED = ("bloom",)
# The same models as sizes of this project's own.
_HEADS = ["model.n_layer=4", "model.n_head=4", "model.n_embd=256", "model.block_size=128", "model.vocab_size=1024"]
_LLAMA = ["model=llama", *_HEADS, "model.kv_heads=2", "model.head_dim=64", "model.mlp_width=512"]
OWN_MODELS = {
    "llama": [*_LLAMA, "model.tied=false"],
    "qwen2": [*_LLAMA, "model.tied=true", "model.qkv_bias=true"],
    "qwen3": [*_LLAMA, "model.tied=false", "model.qk_norm=true"],
    "gpt2": ["model=gpt2", *_HEADS],
}
SPEED = ["data.seq_len=128", "train.precision=fp32", "train.grad_clip=1.0", "parallel=single"]
BY_HAND, CHAIN, OURS = "by hand", "model=transformers", "model=llama or gpt2"
_COMMON = ["model.vocabulary=words", "data=text", "data.min_frequency=1", "logger=none"]
_COMMON += ["device=cpu", "optim=adamw", "train.global_batch_size=8"]
_WORDS = 60


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the tables of the parts."""
    kinds = ["qwen3"] if chosen.quick else list(KINDS)
    parts = chosen.parts or PARTS
    versions = {"transformers": load_transformers().__version__}
    if "layouts" in parts:
        start_fork_server(["training.command.preload", "benchmarks.preload"])
        yield Table("architectures", (verified(kind, chosen.quick) for kind in kinds), versions)
    if "speed" in parts:
        sizes = {key: value for key, value in SMALL.items() if value}
        rows = (timed(kind, chosen.rounds) for kind in kinds if kind not in REFUSED)
        yield Table("architectures_speed", rows, {**versions, "words": SPEED, "sizes": sizes})


def write_config(folder: Path, kind: str, sizes: Mapping[str, Any]) -> None:
    """Write the config.json of an architecture, with those of the sizes that it has."""
    known = type(load_transformers().AutoConfig.for_model(kind))
    keys = known().to_dict()
    known(**{**{key: value for key, value in sizes.items() if key in keys}, **KINDS[kind]}).save_pretrained(folder)


def words_of(folder: Path, kind: str, sizes: Mapping[str, Any]) -> list[str]:
    """Write a model and a text of few words into a folder, and return the command line that trains it."""
    write_config(folder, kind, sizes)
    text = random.Random(0).choices([f"word{number}" for number in range(_WORDS)], k=8192)
    (folder / "text.txt").write_text(" ".join(text))
    words = ["model=transformers", f"model.config={folder}"]
    return [*words, *_COMMON, f"data.root={folder / 'text.txt'}", f"data.cache_dir={folder}"]


# -- layouts -------------------------------------------------------------------------------------------------------


def verified(kind: str, quick: bool = False) -> dict:
    """Return the row of an architecture: the layouts that hold, and what keeps it from the others.

    If ``quick``, in one layout.
    """
    layouts = LAYOUTS[-1:] if quick else LAYOUTS
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = [*words_of(folder, kind, TINY), "data.seq_len=16", "train.precision=fp64"]
        cfg = composed(["mode=verify", *words, "verify.processes=4", "verify.steps=2"])
        try:
            with closing(Runs(cfg, folder / "layouts", prepare(cfg).chain, MICROBATCHES)) as runs:
                results = [runs.compare(layout) for layout in (Layout(chunks=MICROBATCHES), *layouts)][1:]
        except UserError as error:
            return _row(kind, len(layouts), [], [_sentence(str(error))])
    reasons: dict[str, list[str]] = {}
    for result in results:
        if not result.holds:
            why = _sentence(result.reason) if result.reason else "{} differs by {:.0e} {}".format(*result.largest)
            reasons.setdefault(why, []).append(result.name.removeprefix("parallel="))
    return _row(kind, len(layouts), results, [f"{', '.join(names)}: {why}" for why, names in reasons.items()])


def _sentence(reason: str) -> str:
    """Return the beginning of a message, which says what is wrong; the rest says what to do."""
    return re.split(r"; |\. |: give ", reason.splitlines()[0].removeprefix("parallel.tp: "))[0]


def _row(kind: str, count: int, results: Sequence[Compared], reasons: Sequence[str]) -> dict:
    largest = max((result.largest[1] for result in results if result.differences), default=None)
    own = max((result.differences[OWN][0] for result in results if OWN in result.differences), default=None)
    return {
        "architecture": kind,
        "layouts": f"{sum(bool(result.holds) for result in results)} of {count}",
        "largest difference": "" if largest is None else f"{largest:.0e}",
        "with AdamW": "" if own is None else f"{own:.0e}",
        "why not": "; ".join(reasons),
    }


# -- speed ---------------------------------------------------------------------------------------------------------


def timed(kind: str, rounds: int) -> dict:
    """Return the row of an architecture: seconds a step by hand, as a chain, and in this project's own code."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        words = [*words_of(Path(place), kind, SMALL), *SPEED]
        trainer = Trainer.build(0, words)
        model = by_hand(Path(place), trainer)
        steps: dict[str, Callable[[int], object]] = {BY_HAND: model.step, CHAIN: trainer.step}
        if kind in OWN_MODELS:
            steps[OURS] = Trainer.build(0, [*OWN_MODELS[kind], *words[2:]]).step
        seconds = take_turns(steps, rounds, warm_up=2, clock=time.process_time)
    ratio = f"{paired(seconds, CHAIN, OURS):.2f}x" if OURS in steps else ""
    return {
        "architecture": kind,
        **{f"{name}, s": f"{statistics.median(seconds[name]):.4f}" for name in (BY_HAND, CHAIN)},
        "the chain takes": f"{paired(seconds, BY_HAND, CHAIN):.2f}x",
        f"{OURS} takes": ratio,
    }


def by_hand(folder: Path, trainer: Trainer) -> PlainLoop:
    """Return a plain loop on the model that transformers builds from the same configuration."""
    transformers = load_transformers()
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    loss = token_loss(lambda inputs: model(input_ids=inputs, use_cache=False).logits)
    return PlainLoop(trainer, loss, adamw(model))


BENCHMARK = Benchmark(measure, rounds=10, parts=PARTS)
