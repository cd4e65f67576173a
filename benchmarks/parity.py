"""The promise in numbers: ``mode=verify`` of every model of conf/model, under every strategy and schedule.

    python -m benchmarks parity            verifies them, writes results/parity*.csv
    python -m benchmarks parity tensor     only the layouts of up to 8 processes in which ranks share layers
    python -m benchmarks parity context    those in which they share sequences
    python -m benchmarks parity experts    those in which they share experts, or experts and sequences
    python -m benchmarks readme            puts the results into README.md and docs/

Each model is verified by a real command line, or, in the last two parts, as a real command line would; the table has
a row for each layout that was run.
"""

from __future__ import annotations

import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from benchmarks.architectures import TINY, words_of
from benchmarks.command_line import run_directory
from benchmarks.table import Benchmark, Table
from benchmarks.trainer import composed
from conf import options
from launchers.local import start_fork_server
from parallel.axes.context_attention import WAYS
from parallel.axes.tensor import TensorParallel
from parallel.layout import Layout
from training.run.prepare import prepare
from training.studies.verification.layouts import Runs, layouts
from training.studies.verification.report import JSON

WORDS = ["device=cpu", "logger=none"]
PARTS = ("all", "tensor", "context", "experts")
CUT = ("gpt2", "llama", "transformer")  # whose layers can be cut
PROCESSES, MICROBATCHES = 8, 4
# Smaller than they come, and with dropout and clipping; a model that is not named here is verified as it comes.
SIZES = {
    "resnet50": ["data.image_size=64", "data.samples=160"],
    "transformer": ["train.grad_clip=0.5"],
    "llama": ["data.seq_len=64", "train.grad_clip=0.5"],
    "gpt2": ["model.size=tiny", "model.dropout=0.1", "data.seq_len=64", "train.grad_clip=0.5"],
}


# The models of the last two parts: small, as the text is that they read, with dropout if they have it.
SMALL = {
    "gpt2": ["model=gpt2", "model.size=tiny", "model.vocab_size=128", "model.dropout=0.1"],
    "llama": ["model=llama", "model.vocab_size=128", "model.n_layer=4"],
    "transformer": ["model=transformer"],
    "moe": ["model=moe", "model.experts=4", "model.shared_experts=1", "model.balance=0.1", "model.bias_rate=0.01"],
    "transformers": [],  # Qwen3-MoE
}
ZERO_BUBBLE = "interleaved_zero_bubble"
CONTEXT = [
    *(Layout("context", cp=2, context=way, chunks=4) for way in WAYS),
    Layout("context", cp=4, context="ring", chunks=4),
    Layout("pipelined", cp=2, context="ulysses", pp=2, chunks=4, schedule="1f1b"),
    Layout("pipelined", cp=2, context="ring", tp=2, sequence=True, pp=2, chunks=4, schedule="1f1b"),
    Layout("ddp", dp=2, cp=2, context="ulysses", chunks=2),
    Layout("fsdp", dp=2, cp=2, chunks=2),
    Layout("hsdp", dp=4, cp=2, context="ring", shard=2),
    Layout("pipe_ddp", dp=2, cp=2, context="ring", pp=2, chunks=2, schedule=ZERO_BUBBLE),
    Layout("pipe_fsdp", dp=2, cp=2, pp=2, chunks=2, schedule="1f1b"),
]
EXPERTS = [
    Layout("expert", dp=2, ep=2, chunks=2),
    Layout("expert", dp=4, ep=4),
    Layout("ddp", dp=2, ep=2, tp=2, sequence=True, chunks=2),
    Layout("fsdp", dp=4, ep=2),
    Layout("hsdp", dp=4, ep=2, shard=2),
    Layout("pipe_ddp", dp=2, ep=2, pp=2, chunks=2, schedule=ZERO_BUBBLE),
    Layout("pipe_fsdp", dp=2, ep=2, pp=2, chunks=2, schedule="1f1b"),
    Layout("expert", dp=2, ep=2, cp=2, context="ring", chunks=2),
    Layout("fsdp", dp=4, ep=4, cp=2),
    Layout("pipe_ddp", dp=2, ep=2, cp=2, context="ulysses", pp=2, chunks=2, schedule="1f1b"),
]
SHARED = {"context": (CONTEXT, [*SMALL]), "experts": (EXPERTS, ["moe", "transformers"])}


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the tables of all models; if ``quick``, that of the toy."""
    words = {model: " ".join(WORDS + SIZES.get(model, [])) for model in options("model")}
    if "all" in (parts := chosen.parts or PARTS):
        yield Table("parity", (row for model in (["toy"] if chosen.quick else words) for row in rows(model)), words)
    if "tensor" in parts and not chosen.quick:
        shared = {model: f"{words[model]} verify.processes={PROCESSES}" for model in CUT}
        divided = layouts(PROCESSES, MICROBATCHES, divided=TensorParallel.variants)
        divided = [layout for layout in divided if layout.ranks_per_stage > 1]
        typed = [[*x.words(), *[f"parallel.shard={x.shard}"] * (x.shard is not None)] for x in divided]
        found = (row for model in CUT for layout in typed for row in [*rows(model, *layout)][1:])
        yield Table("parity_tensor", found, shared)
    for part, (wanted, models) in SHARED.items():
        if part in parts and not chosen.quick:
            about = {model: " ".join(SMALL[model]) or f"qwen3_moe {TINY}" for model in models}
            found = (row for model in models for row in shared_rows(model, wanted))
            yield Table(f"parity_{part}", found, about)


def shared_rows(model: str, wanted: Sequence[Layout]) -> Iterator[dict]:
    """Compare layouts of a small model with one process, and yield a row for each that is possible."""
    start_fork_server(["training.command.preload", "benchmarks.preload"])
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        words = words_of(Path(place), "qwen3_moe", TINY)
        words = [*SMALL[model], *words[2:]] if SMALL[model] else words
        words += ["data.seq_len=16", "train.precision=fp64", "train.grad_clip=0.5", f"verify.processes={PROCESSES}"]
        cfg = composed(["mode=verify", *words, "verify.steps=3"])
        setup = prepare(cfg)
        runs = stack.enter_context(closing(Runs(cfg, Path(place, "layouts"), setup.chain, MICROBATCHES)))
        for layout in (Layout(chunks=MICROBATCHES), *wanted):
            result = runs.compare(layout)
            if result.holds is not None:
                sizes = {kind: f"{result.differences.get(kind, [0.0])[0]:.0e}" for kind in runs.limits}
                row = {"model": model, "parameters": setup.plan.parameters, "run": result.name, **sizes}
                yield from [row] * (layout.strategy != "single")
            if not result.holds:
                print(f"{model}, {result.name}: {result.reason}")


def rows(model: str, *layout: str) -> Iterator[dict]:
    """Verify a model in all layouts or in the typed one, and yield a row for each, the first for one process."""
    with run_directory("mode=verify", f"model={model}", *WORDS, *SIZES.get(model, []), *layout) as folder:
        certificate = json.loads((folder / JSON).read_text())
    for compared in certificate["layouts"]:
        if compared["holds"] is not None:
            sizes = {kind: f"{compared['differences'].get(kind, [0.0])[0]:.0e}" for kind in certificate["limits"]}
            yield {"model": model, "parameters": certificate["parameters"], "run": compared["name"], **sizes}


BENCHMARK = Benchmark(measure, parts=PARTS)
