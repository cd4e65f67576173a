"""GPT-2 124M on this machine's best device: tokens/s, MFU, and what each optimization is worth.

    python -m benchmarks gpt2 [--rounds 2] [--steps N] [--batch B] [--tokens T] [--quick] [--compile no]

The first row is a tutorial's loop: float32, logits, F.cross_entropy, AdamW with its defaults. The second has every
lever pulled (torch.compile on a GPU only: on a CPU it is a row of its own); each further row moves one of them. Every
measurement is a process of its own, in turns; a row's figure is the median over all steps after the warm-up.

MFU is tokens/s x FLOP per token / peak. FLOP per token = 6 N + 12 L H Q T, with N parameters (without those of the
positions), L layers, H heads of width Q, T tokens. The peak is that of the device's datasheet for dense bf16, if it is
known, else that of a large product of bf16 matrices measured here; both are printed.
"""

from __future__ import annotations

import re
import statistics
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks import table
from benchmarks.timing import Spread, in_new_process, take_turns
from benchmarks.trainer import PlainLoop, Trainer, adamw, configured, same_model, token_loss
from common.errors import PlanError
from models.gpt2_sizes import SIZES, Size
from parallel.devices import check_compiler, keep_freed_memory, synchronize

# FLOP/s, dense bf16.
DATASHEET = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L4": 121e12, "4090": 165e12}
PADDED, PLAIN = 50304, 50257
WARM_UP = 3
ALL, PLAIN_LOOP = "all levers", "plain loop"


@dataclass(frozen=True)
class Levers:
    """The optimizations of one row.

    Attributes:
        microbatch: Sequences that pass through the model at a time.
        precision: As in train.precision.
        fused: Whether AdamW is one kernel.
        vocabulary: Tokens of the model, padded to a multiple of 128 or not.
        compiled: Whether torch.compile is used.
        tutorial: Whether the loop is the tutorial's.
    """

    microbatch: int
    precision: str = "bf16"
    fused: bool = True
    vocabulary: int = PADDED
    compiled: bool = False
    tutorial: bool = False


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        size: As in model.size.
        batch: Sequences per step.
        tokens: Tokens per sequence.
        steps: The number of measured steps per process.
        device: "cpu" or "cuda".
        words: More of the command line.
    """

    size: str
    batch: int
    tokens: int
    steps: int
    device: str
    words: tuple[str, ...] = ("train.grad_clip=null",)


OPTIONS = {
    **table.QUICK,
    "--rounds": dict(type=int, default=2, help="processes for each row"),
    "--steps": dict(type=int, help="measured in each process; 20 on a GPU, else 2"),
    "--batch": dict(type=int, help="sequences per step; 64 on a GPU, else 8"),
    "--tokens": dict(type=int, help="tokens per sequence; 1024 on a GPU, else 256"),
    "--compile": dict(choices=["auto", "no"], default="auto", help="auto: if it works here"),
}


def main(chosen: Namespace) -> None:
    """Measure, and writes results/gpt2.csv and .png."""
    from benchmarks import figure  # here, because matplotlib need not be there for what benchmarks.gpu takes from here

    gpu = torch.cuda.is_available()
    job = Job(
        "tiny" if chosen.quick else "124M",
        batch=chosen.batch or (64 if gpu else 8),
        tokens=64 if chosen.quick else chosen.tokens or (1024 if gpu else 256),
        steps=1 if chosen.quick else chosen.steps or (20 if gpu else 2),
        device="cuda" if gpu else "cpu",
    )
    ways = rows_to_measure(job.batch, gpu, compiler=chosen.compile == "auto" and has_compiler())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 if chosen.quick else chosen.rounds):
        for name, levers in ways.items():
            seconds[name] += in_new_process(measure, job, levers)[ALL]
            print(f"{name}: {statistics.median(seconds[name]):.3f} s", file=sys.stderr, flush=True)
    measured = in_new_process(measured_peak, job.device, 512 if chosen.quick else 8192 if gpu else 2048)
    peak = datasheet_peak() or measured
    rows = tabulate(seconds, ways, job, peak)
    work = f"{flop_per_token(SIZES[job.size], job.tokens, PADDED) / 1e6:.1f} MFLOP a token (6N + 12LHQT)"
    source = "datasheet" if datasheet_peak() else "measured"
    peaks = f"peak {peak / 1e12:.4g} TFLOP/s in bf16 ({source}); measured {measured / 1e12:.4g}"
    print(f"{work}; {peaks}\n")
    path = table.write("gpt2", rows, chosen.quick, **asdict(job), work=work, peak=peaks)
    shown = [row for row in rows if row["MFU"]]
    figure.bars(path.with_suffix(".png"), shown, [ALL], width=12.0, title=title(shown))


def rows_to_measure(batch: int, gpu: bool, compiler: bool) -> dict[str, Levers]:
    """Return what each row of the table measures, by its name."""
    best = Levers(microbatch=batch, compiled=gpu and compiler)
    rows = {
        "a tutorial's loop, fp32": Levers(batch, "fp32", fused=False, vocabulary=PLAIN, tutorial=True),
        ALL: best,
        "without bf16": replace(best, precision="fp32"),
        "without fused AdamW": replace(best, fused=False),
        f"without padding (vocabulary {PLAIN})": replace(best, vocabulary=PLAIN),
        f"micro-batch {batch // 2}": replace(best, microbatch=batch // 2),
        f"micro-batch {batch // 4}": replace(best, microbatch=batch // 4),
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


def measure(job: Job, levers: Levers, beside_plain: bool = False) -> dict[str, list[float]]:
    """Return the seconds of each measured step, and of those of a plain loop in turns with them if it is wanted."""
    keep_freed_memory()
    trainer = Trainer(configured([*command_line(job, levers), "parallel=single"]))
    steps = {ALL: trainer.step}
    if levers.tutorial:
        (stage,) = trainer.strategy.stages
        steps[ALL] = PlainLoop(trainer, token_loss(stage.layers), adamw(stage.layers, fused=False)).step
    if beside_plain:
        model = same_model(trainer)
        steps[PLAIN_LOOP] = PlainLoop(trainer, token_loss(model), adamw(model), levers.compiled).step
    return take_turns(steps, job.steps, min(job.steps, WARM_UP))


def command_line(job: Job, levers: Levers) -> list[str]:
    """Return the overrides of train.py, without the layout."""
    return [
        "model=gpt2", f"model.size={job.size}", f"model.vocab_size={levers.vocabulary}",
        f"parallel.chunks={job.batch // levers.microbatch}", f"train.global_batch_size={job.batch}",
        f"data.seq_len={job.tokens}", f"train.precision={levers.precision}", f"train.compile={levers.compiled}",
        f"device={job.device}", "logger=none", *job.words,
        *([] if levers.fused else ["optim.fused=false"]),
        *([f"model.block_size={job.tokens}"] if job.tokens > SIZES[job.size].block_size else []),
    ]  # fmt: skip


def measured_peak(device: str, width: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the FLOP/s of the fastest of ten products of matrices of shape [width, width]."""
    a, b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))

    def product(number: int) -> None:
        torch.mm(a, b)
        synchronize(a.device)

    return 2 * width**3 / min(take_turns({ALL: product}, 10, WARM_UP)[ALL])


def datasheet_peak() -> float | None:
    """Return the dense bf16 FLOP/s of this GPU by its datasheet; None if it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in DATASHEET.items() if re.search(rf"\b{part}\b", name)), None)


def flop_per_token(size: Size, tokens: int, vocabulary: int) -> float:
    """Return 6 N + 12 L H Q T for sequences of ``tokens``; N counts the tied head once and no positions."""
    width = size.n_embd
    block = 12 * width**2 + 13 * width  # four matrices with their biases, two norms
    parameters = size.n_layer * block + 2 * width + vocabulary * width
    return 6 * parameters + 12 * size.n_layer * width * tokens


def rates(spread: Spread, job: Job, size: Size, vocabulary: int, peak: float) -> dict[str, str]:
    """Return tokens/s and MFU as columns of a table."""
    rate = job.batch * job.tokens / spread.median
    work = flop_per_token(size, job.tokens, vocabulary)
    return {"tokens/s": f"{rate:,.0f}", "MFU": f"{rate * work / peak:.1%}"}


def tabulate(seconds: dict[str, list[float]], ways: dict[str, Levers], job: Job, peak: float) -> list[dict]:
    """Return the rows of the table; the FLOP of a token are those of the row's vocabulary."""
    spreads = {name: Spread.of(values) for name, values in seconds.items()}
    return [
        {
            "run": name,
            **spread.columns(),
            **rates(spread, job, SIZES[job.size], ways[name].vocabulary, peak),
            "time against all levers": f"{spread.median / spreads[ALL].median:.2f}x",
        }
        for name, spread in spreads.items()
    ]


def title(rows: list[dict]) -> str:
    """Return what the table shows, in one line."""
    tutorial, _, *others = ((row["run"], float(row["time against all levers"].rstrip("x"))) for row in rows)
    (dearest, most), *rest = sorted(others, key=lambda other: other[1], reverse=True)
    return (
        f"All levers: {rows[1]['tokens/s']} tokens/s, {tutorial[1]:.1f} times as many as {tutorial[0]};\n"
        f"a step takes {most:.1f} times as long {dearest}, and at most {rest[0][1]:.2f} times in the other rows"
    )
