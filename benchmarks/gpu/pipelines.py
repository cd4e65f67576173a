"""GPT-2 in one, two and four processes on one GPU: what it costs that tensors between them go through main memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import torch

from benchmarks.gpu.gpt2 import random_tokens, tokens_of
from benchmarks.ranks import Workers
from benchmarks.timing import Spread, take_turns
from benchmarks.trainer import Trainer

STAGES = (1, 2, 4)
STEPS, WARM_UP = 8, 2


def rows(toy: bool) -> Iterator[dict]:
    """Yield one row per number of stages; stages are dealt to the GPUs in turn, where there are several."""
    sequences, chunks = (8, 4) if toy else (64, 8)
    reference = None
    with random_tokens(toy, sequences) as overrides:
        overrides += ["model.n_layer=2"] if toy else []
        for stages in STAGES:
            layout = ["parallel=single"] if stages == 1 else ["parallel=pipelined", f"parallel.pp={stages}"]
            layout += [f"parallel.chunks={chunks}"]
            device = "cpu" if toy else "cuda"
            with closing(Workers(Trainer.build, [*overrides, *layout], size=stages, device=device)) as workers:
                seconds = take_turns({"": workers.step}, 1 if toy else STEPS, 1 if toy else WARM_UP)[""]
            spread = Spread.of(seconds)
            reference = reference or spread.median
            yield {
                "run": " ".join(layout),
                "processes": stages,
                "GPUs": min(stages, torch.cuda.device_count()),
                **spread.columns(),
                "tokens/s": f"{sequences * tokens_of(toy) / spread.median:,.0f}",
                "as fast as one process": f"{reference / spread.median:.2f}x",
            }
