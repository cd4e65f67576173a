"""GPT-2 124M on this machine's best device: tokens/s, MFU, and what each optimization is worth.

    python -m benchmarks gpt2 [--rounds 2] [--quick]

The first row is a tutorial's loop: float32, logits, F.cross_entropy, AdamW with its defaults. The second has every
lever pulled (torch.compile on a GPU only: on a CPU it is a row of its own); each further row moves one of them. The
last one is nanoGPT's loop with the same precision and fused AdamW, in turns with the second row in its process. Every
other measurement is a process of its own, in turns; a row's figure is the median over all steps after the warm-up.

MFU is tokens/s x FLOP per token / peak. FLOP per token = 6 N + 12 L H Q T, with N parameters (without those of the
positions), L layers, H heads of width Q, T tokens. The peak is that of the device's datasheet for dense bf16, if it is
known, else that of a large product of bf16 matrices measured here; both are printed.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.table import Benchmark, Table
from benchmarks.timing import Spread, in_new_process, tabulate, take_turns
from benchmarks.trainer import PlainLoop, Trainer, adamw, configured, same_model, token_loss
from common.errors import PlanError
from models.gpt2_sizes import SIZES, Size
from parallel.devices import check_compiler, keep_freed_memory, synchronize

# FLOP/s, dense bf16.
DATASHEET = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "4090": 165e12}
PADDED, PLAIN = 50304, 50257
WARM_UP = 3
ALL, OURS, PLAIN_LOOP = "all levers", "this project", "plain loop"


@dataclass(frozen=True)
class Job:
    """What is trained, and the optimizations of a row.

    Attributes:
        size: As in model.size.
        batch: Sequences per step.
        tokens: Tokens per sequence.
        steps: The number of measured steps per process.
        device: "cpu" or "cuda".
        microbatch: Sequences that pass through the model at a time.
        precision: As in train.precision.
        fused: Whether AdamW is one kernel.
        vocabulary: Tokens of the model, padded to a multiple of 128 or not.
        compiled: Whether torch.compile is used.
        tutorial: Whether the loop is the tutorial's.
        words: More of the command line.
    """

    size: str
    batch: int
    tokens: int
    steps: int
    device: str
    microbatch: int
    precision: str = "bf16"
    fused: bool = True
    vocabulary: int = PADDED
    compiled: bool = False
    tutorial: bool = False
    words: tuple[str, ...] = ("train.grad_clip=null",)


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all levers."""
    gpu = torch.cuda.is_available()
    size, steps, width = ("tiny", 1, 512) if chosen.quick else ("124M", 20, 8192) if gpu else ("124M", 2, 2048)
    batch, tokens = 64 if gpu else 8, 64 if chosen.quick else 1024 if gpu else 256
    job = Job(size, batch, tokens, steps, "cuda" if gpu else "cpu", microbatch=batch)
    ways = rows_to_measure(job, has_compiler())
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, PLAIN_LOOP)}
    for _ in range(chosen.rounds):
        for name, way in ways.items():
            found = in_new_process(timed, way, name == ALL)
            seconds[name] += found[OURS]
            seconds[PLAIN_LOOP] += found.get(PLAIN_LOOP, [])
            print(f"{name}: {Spread.of(seconds[name]).median:.3f} s", file=sys.stderr, flush=True)
    measured = in_new_process(measured_peak, job.device, width)
    peak = datasheet_peak() or measured
    work = f"{flop_per_token(SIZES[size], tokens, PADDED) / 1e6:.1f} MFLOP a token (6N + 12LHQT)"
    source = "datasheet" if datasheet_peak() else "measured"
    peaks = f"peak {peak / 1e12:.4g} TFLOP/s in bf16 ({source}); measured {measured / 1e12:.4g}"
    print(f"{work}; {peaks}\n")
    about = {"size": size, "batch": batch, "tokens": tokens, "steps": steps, "device": job.device}
    ways[PLAIN_LOOP] = ways[ALL]
    yield Table("gpt2", rows_of(seconds, ways, peak), {**about, "work": work, "peak": peaks}, draw)


def rows_to_measure(job: Job, compiler: bool) -> dict[str, Job]:
    """Return what each row of the table measures, by its name."""
    best = replace(job, compiled=job.device == "cuda" and compiler)
    rows = {
        "a tutorial's loop, fp32": replace(job, precision="fp32", fused=False, vocabulary=PLAIN, tutorial=True),
        ALL: best,
        "without bf16": replace(best, precision="fp32"),
        "without fused AdamW": replace(best, fused=False),
        f"without padding (vocabulary {PLAIN})": replace(best, vocabulary=PLAIN),
        f"micro-batch {job.batch // 2}": replace(best, microbatch=job.batch // 2),
        f"micro-batch {job.batch // 4}": replace(best, microbatch=job.batch // 4),
    }
    if compiler:
        rows["without compile" if best.compiled else "with compile"] = replace(best, compiled=not best.compiled)
    return rows


def has_compiler() -> bool:
    """Return whether torch.compile works; prints why not."""
    try:
        check_compiler()
    except PlanError as error:
        print(f"no row for compile: {error}", file=sys.stderr)
        return False
    return True


def timed(job: Job, beside_plain: bool = False, others: Mapping[str, Job] | None = None) -> dict[str, list[float]]:
    """Return the seconds of each measured step.

    In turns with them, those of a plain loop if it is wanted, and those of ``others`` by name.
    """
    keep_freed_memory()
    trainer = Trainer(configured([*command_line(job), "parallel=single"]))
    steps = {OURS: trainer.step}
    if job.tutorial:
        (stage,) = trainer.strategy.stages
        steps[OURS] = PlainLoop(trainer, token_loss(stage.layers), adamw(stage.layers, fused=False)).step
    if beside_plain:
        model = same_model(trainer)
        steps[PLAIN_LOOP] = PlainLoop(trainer, token_loss(model), adamw(model), job.compiled).step
    for name, other in (others or {}).items():
        steps[name] = Trainer(configured([*command_line(other), "parallel=single"])).step
    return take_turns(steps, job.steps, min(job.steps, WARM_UP))


def command_line(job: Job) -> list[str]:
    """Return the overrides of train.py, without the layout."""
    return [
        "model=gpt2", f"model.size={job.size}", f"model.vocab_size={job.vocabulary}",
        f"parallel.chunks={job.batch // job.microbatch}", f"train.global_batch_size={job.batch}",
        f"data.seq_len={job.tokens}", f"train.precision={job.precision}", f"train.compile={job.compiled}",
        f"device={job.device}", "logger=none", *job.words, *([] if job.fused else ["optim.fused=false"]),
    ]  # fmt: skip


def measured_peak(device: str, width: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the FLOP/s of the fastest of ten products of matrices of shape [width, width]."""
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))

    def product(number: int) -> None:
        torch.mm(a, b)
        synchronize(a.device)

    return 2 * width**3 / min(take_turns({"": product}, 10, WARM_UP)[""])


def datasheet_peak() -> float | None:
    """Return the dense bf16 FLOP/s of this GPU by its datasheet; None if it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in DATASHEET.items() if re.search(rf"\b{part}\b", name)), None)


def flop_per_token(size: Size, tokens: int, vocabulary: int) -> float:
    """Return 6 N + 12 L H Q T for sequences of ``tokens``; N counts the tied head once and no positions."""
    parameters = replace(size, vocab_size=vocabulary).parameters - size.block_size * size.n_embd
    return 6 * parameters + 12 * size.n_layer * size.n_embd * tokens


def rates(spread: Spread, job: Job, peak: float) -> dict[str, str]:
    """Return tokens/s and MFU as columns of a table."""
    rate = job.batch * job.tokens / spread.median
    work = flop_per_token(SIZES[job.size], job.tokens, job.vocabulary)
    return {"tokens/s": f"{rate:,.0f}", "MFU": f"{rate * work / peak:.1%}"}


def rows_of(seconds: dict[str, list[float]], ways: dict[str, Job], peak: float) -> list[dict]:
    """Return the rows of the table; the FLOP of a token are those of the row's vocabulary."""
    best = Spread.of(seconds[ALL]).median
    return tabulate(
        seconds,
        lambda name, spread: {
            **rates(spread, ways[name], peak),
            "time against all levers": f"{spread.median / best:.2f}x",
        },
    )


def draw(path: Path, rows: list[dict]) -> None:
    """Draw a bar for each row."""
    from benchmarks import figure  # here, because matplotlib need not be there for what benchmarks.gpu takes from here

    figure.bars(path, rows, [ALL], width=12.0)


BENCHMARK = Benchmark(measure, rounds=2)
