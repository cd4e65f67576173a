"""GPT-2 at 1,024 tokens by micro-batch size: this project's step beside nanoGPT's loop on the same model."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpt2 import datasheet_peak, flop_per_token, has_compiler, measured_peak
from benchmarks.plain import PlainLoop, adamw, same_model, token_loss
from benchmarks.timing import Spread, paired, take_turns
from benchmarks.trainer import Trainer, configured
from models.gpt2 import SIZES, resolve_size

OURS, PLAIN = "this project", "plain loop"
# (sequences in a micro-batch, micro-batches a step): 131,072 tokens a step. Compiling takes a minute for each size.
EAGER = ((4, 32), (8, 16), (16, 8), (32, 4), (64, 2))
COMPILED = ((16, 8), (32, 4), (32, 16))  # and 524,288 tokens a step
TOY = ((1, 2), (2, 1))
STEPS, WARM_UP = 10, 3
_TOKENS, _TOY_TOKENS, _VOCABULARY, _TOY_VOCABULARY = 1024, 16, 50304, 512
_TOY_MODEL = ("model.size=tiny", "model.n_layer=1", f"model.vocab_size={_TOY_VOCABULARY}")


def eager(toy: bool) -> Iterator[dict]:
    """Yield the rows without torch.compile."""
    yield from _rows(toy, TOY if toy else EAGER, compiled=False)


def compiled(toy: bool) -> Iterator[dict]:
    """Yield the rows with torch.compile; none where it does not work here, which is printed."""
    if has_compiler():
        yield from _rows(toy, TOY[1:] if toy else COMPILED, compiled=True)


@contextmanager
def random_tokens(toy: bool, sequences: int) -> Iterator[list[str]]:
    """Yield the overrides that train on tokens of no text, enough for the batches of a ``Trainer``."""
    tokens, vocabulary = (_TOY_TOKENS, _TOY_VOCABULARY) if toy else (_TOKENS, _VOCABULARY)
    with tempfile.TemporaryDirectory() as folder:
        drawn = np.random.default_rng(1).integers(vocabulary, size=3 * sequences * (tokens + 1), dtype=np.uint16)
        drawn.tofile(Path(folder) / "train.bin")
        yield [
            "model=gpt2", "data=tokens", f"data.root={folder}", "data.format=nanogpt", f"data.cache_dir={folder}/cache",
            f"data.vocab_size={vocabulary}", f"data.seq_len={tokens}", "train.eval_every=null", "train.precision=bf16",
            "logger=none", f"device={'cpu' if toy else 'cuda'}", f"train.global_batch_size={sequences}",
            *(_TOY_MODEL if toy else ()),
        ]  # fmt: skip


def tokens_of(toy: bool) -> int:
    """Return the tokens of a sequence."""
    return _TOY_TOKENS if toy else _TOKENS


def _rows(toy: bool, cases: Sequence[tuple[int, int]], compiled: bool) -> Iterator[dict]:
    device = "cpu" if toy else "cuda"
    peak = (None if toy else datasheet_peak()) or measured_peak(device, 64 if toy else 8192)
    size = resolve_size("tiny", n_layer=1) if toy else SIZES["124M"]
    work = flop_per_token(size, tokens_of(toy), _TOY_VOCABULARY if toy else _VOCABULARY)
    for microbatch, chunks in cases:
        case = {"micro-batch": microbatch, "micro-batches": chunks, "compiled": compiled}
        try:
            seconds = _measured(toy, microbatch, chunks, compiled)
        except torch.OutOfMemoryError:
            print(f"micro-batch {microbatch}: out of memory", flush=True)
            continue
        for name, values in seconds.items():
            spread = Spread.of(values)
            rate = microbatch * chunks * tokens_of(toy) / spread.median
            yield {
                "run": name,
                **case,
                **spread.columns(),
                "tokens/s": f"{rate:,.0f}",
                "MFU": f"{rate * work / peak:.1%}",
                "as fast as the plain loop": f"{paired(seconds, name, PLAIN):.2f}x",
            }


def _measured(toy: bool, microbatch: int, chunks: int, compiled: bool) -> dict[str, list[float]]:
    """Return the seconds of each step of both, which take turns on one device."""
    free_memory()
    with random_tokens(toy, microbatch * chunks) as overrides:
        trainer = Trainer(configured([*overrides, f"parallel.chunks={chunks}", f"train.compile={compiled}"]))
        model = same_model(trainer)
        plain = PlainLoop(trainer, token_loss(model), adamw(model), compiled)
        steps = {OURS: trainer.step, PLAIN: plain.step}
        return take_turns(steps, 1 if toy else STEPS, 1 if toy else WARM_UP)


def free_memory() -> None:
    """Give back what the last case held, and forgets what was compiled for it."""
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()
