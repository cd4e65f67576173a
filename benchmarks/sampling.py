"""Tokens/s of GPT-2: with and without its keys and values kept, and of transformers' generate on the same weights.

    python -m benchmarks sampling [--rounds 3] [--quick]

All contenders take turns in one process and draw the likeliest token each time, so that they can be compared token for
token. Of 124M parameters with random weights, in fp32, on the CPU.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator

import torch

from benchmarks.table import Benchmark, Table
from benchmarks.timing import take_turns
from common.packages import load_transformers
from models.generate import Draws, generate
from models.gpt2 import gpt2

VOCABULARY = 50257
PROMPT = 16
OURS, WHOLE, THEIRS = "keys and values kept", "the whole text for each token", "transformers.generate"
Tokens = list[list[int]]


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table for one prompt and for eight."""
    size, tokens = ("tiny", 8) if chosen.quick else ("124M", 64)
    about = {"size": size, "prompt": PROMPT, "tokens": tokens, "threads": torch.get_num_threads()}
    rows = (row for batch in (1, 8) for row in rows_of(size, batch, tokens, chosen.rounds))
    yield Table("sampling", rows, about)


def rows_of(size: str, batch: int, tokens: int, rounds: int) -> list[dict]:
    """Return the rows for ``batch`` prompts."""
    runs = contenders(size, batch, tokens)
    seconds = take_turns(runs, rounds)
    drawn = {name: run(0) for name, run in runs.items()}
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "prompts": batch,
            "run": name,
            "tokens/s": f"{batch * tokens / median:.1f}",
            "against transformers": f"{medians[THEIRS] / median:.2f}x",
            "same tokens": "yes" if drawn[name] == drawn[OURS] else "no",
        }
        for name, median in medians.items()
    ]


def contenders(size: str, batch: int, count: int) -> dict[str, Callable[[int], Tokens]]:
    """Return the runs by name. Each returns its tokens, the same in every round."""
    load_transformers()
    from transformers import GPT2Config, GPT2LMHeadModel

    chain = gpt2(size, vocab_size=VOCABULARY)
    layers = chain.build(chain.names, 1, torch.device("cpu")).eval()
    weights, config = chain.hugging_face.export(layers.state_dict(), VOCABULARY)
    reference = GPT2LMHeadModel(GPT2Config(**config)).eval()
    reference.load_state_dict(weights, strict=False)  # the head is tied
    prompts = torch.randint(0, VOCABULARY, (batch, PROMPT), generator=torch.Generator().manual_seed(1))

    def ours(cached: bool) -> Tokens:
        limits = {"positions": chain.limits["positions"], "vocab_size": VOCABULARY}
        device = torch.device("cpu")
        return generate(layers, prompts.tolist(), count, Draws(temperature=0), **limits, device=device, cached=cached)

    def theirs(number: int) -> Tokens:
        ends = {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": VOCABULARY - 1}
        with torch.no_grad():
            whole = reference.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, **ends)
        return whole[:, PROMPT:].tolist()

    return {OURS: lambda number: ours(True), WHOLE: lambda number: ours(False), THEIRS: theirs}


BENCHMARK = Benchmark(measure, rounds=3)
