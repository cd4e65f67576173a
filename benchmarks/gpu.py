"""One NVIDIA GPU, measured in parts of less than ten minutes that each leave their rows as they are measured.

    python -m benchmarks gpu [PART …] [--dry-run] [--output FOLDER]

peaks           measured bandwidth of copies, and the fastest products of matrices
gpt2            tokens/s and MFU of GPT-2 124M at 1,024 tokens, by micro-batch size, beside nanoGPT's loop
gpt2_compiled   the same with torch.compile, and the 524,288 tokens a step of experiment=gpt2_524k
profile         where a step of GPT-2 goes: matmul, attention, cross entropy, elementwise, …, idle
resnet50        images/s at 224 pixels, and the published 3 x 120 images of 128 pixels, beside torchvision's model
pipelines       GPT-2 in two and four pipeline ranks on one GPU
planner         seconds and memory of GPT-2 and ResNet-50 in five layouts, as predicted and as measured

Without a PART all run one after the other, each in a process of its own that is ended after ten minutes. A part writes
gpu_PART.csv after every row, and date, card and versions into the JSON file beside it. Nothing is downloaded: tokens
and images are random. --dry-run goes through every part on the CPU at toy size, in a minute or two.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import which

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmarks.gpt2 import (
    OURS,
    PADDED,
    PLAIN_LOOP,
    Job,
    command_line,
    datasheet_peak,
    has_compiler,
    measured_peak,
    rates,
    timed,
)
from benchmarks.layouts_here import row as layout_row
from benchmarks.ranks import Workers
from benchmarks.table import Benchmark, Table
from benchmarks.timing import paired, tabulate, take_turns
from benchmarks.trainer import Loss, PlainLoop, Trainer, adamw, configured, same_model, token_loss
from common.packages import load_torchvision
from conf.composition import Composed
from launchers import start_fork_server
from parallel.devices import keep_freed_memory, synchronize
from training.command.api import load_config
from training.command.app import plain
from training.studies.planning.choice import predict_here
from training.studies.planning.trial import try_layout

LIMIT_S = 600
TORCHVISION = "torchvision, plain loop"
# (sequences in a micro-batch, micro-batches a step): 131,072 tokens a step. Compiling takes a minute for each size.
EAGER = ((4, 32), (8, 16), (16, 8), (32, 4), (64, 2))
COMPILED = ((32, 4), (64, 8))  # the last: 524,288 tokens a step
RESIDUAL = "this project, bf16_residual"
# Of kernels and, on a CPU, of operators; the first that is found in a name counts.
CATEGORIES = {
    kind: re.compile(names, re.IGNORECASE)
    for kind, names in {
        "copies": r"memcpy|memset",
        "attention": r"attention|sdpa|flash|fmha",
        "matmul": r"gemm|nvjet|xmma|cutlass|splitk|(^|::|_)(add|b|badd)?mm$|matmul|aten::linear",
        "cross entropy": r"cross_?entropy|soft_?max|nll_?loss|^_row$",  # the last: models/cross_entropy_kernel.py
        "optimizer": r"adam|sgd|optimizer|foreach|multi_tensor",
    }.items()
}
CLASSES = 1000


def peaks(toy: bool) -> Iterator[dict]:
    """Yield one row per measurement: the best of twenty copies, or of ten products."""
    device = torch.device(_device(toy))
    size, width = (2**16, 64) if toy else (2**30, 8192)
    here = torch.ones(size, dtype=torch.uint8, device=device)
    there, host = torch.empty_like(here), torch.ones(size // 4, dtype=torch.uint8)
    host, part = host if toy else host.pin_memory(), here[: size // 4]
    for name, source, target, moved in (
        ("within the device's memory", here, there, 2 * size),  # each byte is read once and written once
        ("to the device, pinned memory", host, part, len(host)),
        ("from the device, pinned memory", part, host, len(host)),
    ):

        def copy(number: int, source: Tensor = source, target: Tensor = target) -> None:
            target.copy_(source)
            synchronize(device)

        seconds = min(take_turns({"": copy}, 20, warm_up=3)[""])
        yield _peak(f"copy {name}", moved / seconds / 1e9, "GB/s")
    datasheet = None if toy else datasheet_peak()
    for name in ("bfloat16", "float16", "float32", "tf32"):
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        reached = measured_peak(device.type, width, getattr(torch, name, torch.float32))
        share = f"{reached / datasheet:.1%}" if datasheet and name.endswith("16") else ""
        yield _peak(f"product of {width} x {width} matrices, {name}", reached / 1e12, "TFLOP/s", share)


def gpt2(toy: bool) -> Iterator[dict]:
    """Yield the rows of GPT-2 without torch.compile."""
    yield from _ladder(toy, ((1, 2), (2, 1)) if toy else EAGER, compiled=False)


def gpt2_compiled(toy: bool) -> Iterator[dict]:
    """Yield the rows with torch.compile; none where it does not work here, which is printed."""
    if has_compiler():
        yield from _ladder(toy, ((2, 1),) if toy else COMPILED, compiled=True)


def _ladder(toy: bool, cases: Sequence[tuple[int, int]], compiled: bool) -> Iterator[dict]:
    peak = (None if toy else datasheet_peak()) or measured_peak(_device(toy), 64 if toy else 8192)
    for microbatch, chunks in cases:
        _free_memory()
        try:
            with _job(toy, microbatch, chunks, compiled) as job:
                others = {RESIDUAL: replace(job, precision="bf16_residual")} if compiled else {}
                seconds = timed(job, beside_plain=True, others=others)
        except torch.OutOfMemoryError:
            print(f"micro-batch {microbatch}: out of memory", flush=True)
            continue
        for row in tabulate(seconds, lambda _, spread, job=job: rates(spread, job, peak)):
            about = {"micro-batch": microbatch, "micro-batches": chunks, "compiled": compiled}
            yield row | about | {"as fast as the plain loop": f"{paired(seconds, row['run'], PLAIN_LOOP):.2f}x"}


@contextmanager
def _job(toy: bool, microbatch: int, chunks: int, compiled: bool = False) -> Iterator[Job]:
    """Yield what is trained on tokens of no text, enough for the batches of a ``Trainer``."""
    size, tokens, vocabulary, steps = ("tiny", 16, 512, 1) if toy else ("124M", 1024, PADDED, 10)
    batch = microbatch * chunks
    with tempfile.TemporaryDirectory() as folder:
        drawn = np.random.default_rng(1).integers(vocabulary, size=3 * batch * (tokens + 1), dtype=np.uint16)
        drawn.tofile(Path(folder) / "train.bin")
        words = (
            "data=tokens", f"data.root={folder}", "data.format=nanogpt", f"data.cache_dir={folder}/cache",
            f"data.vocab_size={vocabulary}", "train.eval_every=null", *["model.n_layer=2"] * toy,
        )  # fmt: skip
        device = _device(toy)
        yield Job(size, batch, tokens, steps, device, microbatch, vocabulary=vocabulary, compiled=compiled, words=words)


def where_it_goes(toy: bool) -> Iterator[dict]:
    """Yield where a step of GPT-2 goes in this project and in the plain loop, eager and compiled."""
    microbatch, chunks, steps, warm_up = (2, 2, 1, 1) if toy else (32, 4, 3, 4)
    for compiled in (False, True) if not toy and has_compiler() else (False,):
        _free_memory()
        with _job(toy, microbatch, chunks, compiled) as job:
            trainer = Trainer(configured([*command_line(job), "parallel=single"]))
        model = same_model(trainer)
        plain = PlainLoop(trainer, token_loss(model), adamw(model), compiled)
        for name, step in ((OURS, trainer.step), (PLAIN_LOOP, plain.step)):
            seconds = _profiled(step, steps, warm_up, trainer.strategy.device)
            total = seconds.pop("total")
            yield {
                "run": name,
                "micro-batch": microbatch,
                "compiled": compiled,
                "seconds a step": f"{total / steps:.4f}",
                "tokens/s, profiled": f"{job.batch * job.tokens * steps / total:,.0f}",
                **{category: f"{value / total:.1%}" for category, value in seconds.items()},
            }


def _profiled(step: Callable[[int], object], steps: int, warm_up: int, device: torch.device) -> dict[str, float]:
    """Return the seconds of each category, of idleness and in all; kernels that overlap count each."""
    for number in range(1, warm_up + 1):
        step(number)
    synchronize(device)
    activities = list(supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA})
    with profile(activities=activities) as recorded:
        start = time.perf_counter()
        for number in range(1, steps + 1):
            step(number)
        synchronize(device)
        total = time.perf_counter() - start
    seconds = dict.fromkeys([*CATEGORIES, "elementwise"], 0.0)
    for event in recorded.key_averages():
        if not event.is_user_annotation and event.device_type.name.lower() == device.type:
            own = event.self_cpu_time_total if device.type == "cpu" else event.self_device_time_total
            seconds[category(event.key)] += own / 1e6
    return {**seconds, "idle": max(0.0, total - sum(seconds.values())), "total": total}


def category(name: str) -> str:
    """Return what a kernel, or an operator on a CPU, computes, by its name."""
    return next((kind for kind, names in CATEGORIES.items() if names.search(name)), "elementwise")


def resnet50(toy: bool) -> Iterator[dict]:
    """Yield the rows of each batch: this project's and, where it is installed, torchvision's, in turns."""
    batch, pixels, small, published = (4, 32, 4, 40) if toy else (256, 224, 120, 128)
    modern = ["model.loss=cross_entropy", "train.precision=bf16"]
    for compiled in (False, True) if not toy and has_compiler() else (False,):
        yield from _images(toy, f"{pixels} pixels", batch, pixels, modern, F.cross_entropy, compiled)
    name = f"published: {small} images of {published} pixels, fp32"
    yield from _images(toy, name, small, published, ["train.precision=fp32"], _squared_error, compiled=False)


def _images(
    toy: bool, name: str, batch: int, pixels: int, words: list[str], criterion: Loss, compiled: bool
) -> Iterator[dict]:
    _free_memory()
    trainer = Trainer(
        configured(
            [
                "model=resnet50", f"data.image_size={pixels}", f"train.global_batch_size={batch}",
                f"data.samples={2 * batch}", "train.eval_every=null", "train.tf32=true", f"train.compile={compiled}",
                f"train.cudnn_benchmark={not toy}", f"device={_device(toy)}", "logger=none", *words,
            ]
        )
    )  # fmt: skip
    steps: dict[str, Callable[[int], object]] = {OURS: trainer.step}
    try:
        steps[TORCHVISION] = _torchvision(trainer, criterion, compiled).step
    except ImportError as error:
        print(f"no row of torchvision's plain loop: {error}", flush=True)
    # cuDNN tries its algorithms in the first steps.
    seconds = take_turns(steps, 1 if toy else 10, 1 if toy else 5)
    for row in tabulate(seconds, lambda _, spread: {"images/s": f"{batch / spread.median:,.1f}"}):
        about = {"images": name, "batch": batch, "compiled": compiled}
        about["seconds for 3 batches"] = f"{3 * float(row['seconds a step (median)']):.3f}"
        other = f"{paired(seconds, row['run'], TORCHVISION):.2f}x" if TORCHVISION in seconds else ""
        yield row | about | {"as fast as torchvision's": other}


def _torchvision(trainer: Trainer, criterion: Loss, compiled: bool) -> PlainLoop:
    load_torchvision()
    from torchvision.models import resnet50

    model = resnet50(num_classes=CLASSES).to(trainer.strategy.device, memory_format=torch.channels_last)

    def loss(images: Tensor, classes: Tensor) -> Tensor:
        return criterion(model(images.contiguous(memory_format=torch.channels_last)), classes)

    optimizer = torch.optim.SGD(model.parameters(), lr=trainer.optimizer.base_lr, fused=True)
    return PlainLoop(trainer, loss, optimizer, compiled)


def _squared_error(output: Tensor, classes: Tensor) -> Tensor:
    return F.mse_loss(output, F.one_hot(classes, CLASSES).to(output.dtype))


def pipelines(toy: bool) -> Iterator[dict]:
    """Yield a row for one, two and four stages; they are dealt to the GPUs in turn, where there are several."""
    microbatch, chunks, reference = (2, 4, None) if toy else (8, 8, None)
    with _job(toy, microbatch, chunks) as job:
        for stages in (1, 2, 4):
            layout = ["parallel=single"] if stages == 1 else ["parallel=pipelined", f"parallel.pp={stages}"]
            words = [*command_line(job), *layout]
            with closing(Workers(Trainer.build, words, size=stages, device=job.device)) as workers:
                seconds = take_turns({" ".join(layout): workers.step}, 1 if toy else 8, 1 if toy else 2)
            (row,) = tabulate(seconds, lambda _, spread: {"tokens/s": f"{job.batch * job.tokens / spread.median:,.0f}"})
            median = float(row["seconds a step (median)"])
            reference = reference or median
            about = {"processes": stages, "GPUs": min(stages, torch.cuda.device_count()), "chunks": chunks}
            yield row | about | {"as fast as one process": f"{reference / median:.2f}x"}


def planner(toy: bool) -> Iterator[dict]:
    """Yield each number of micro-batches with which one process takes a step, as predicted and measured."""
    start_fork_server(["training.command.preload"])
    batch, chunks, image, chosen_batch = (4, (1, 2), 32, 8) if toy else (32, (1, 2, 4, 8, 16), 224, 256)
    with _job(toy, batch, 1) as job:
        images = ["model=resnet50", f"data.image_size={image}", "model.loss=cross_entropy"]
        images += [f"train.global_batch_size={chosen_batch}", f"data.samples={2 * chosen_batch}"]
        for name, words in {"gpt2": command_line(job), "resnet50": [*images, f"device={_device(toy)}"]}.items():
            layout = ["parallel=auto", "parallel.dp=1", "parallel.pp=1", "logger=none"]
            cfg = plain(Composed(load_config(*words, *layout, "train.precision=bf16"), Path())).cfg
            found, _ = predict_here(cfg, (1,))
            for candidate in sorted(found.best, key=lambda candidate: candidate.layout.chunks):
                chosen = candidate.layout
                if chosen.strategy == "single" and chosen.recompute == "none" and chosen.chunks in chunks:
                    yield layout_row(name, candidate, try_layout(cfg, candidate, 0.1 if toy else 4.0))


def _device(toy: bool) -> str:
    return "cpu" if toy else "cuda"


def _free_memory() -> None:
    """Give back what the last case held, and forget what was compiled for it."""
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()


def _peak(what: str, value: float, unit: str, share: str = "") -> dict:
    return {"what": what, "value": f"{value:.4g}", "unit": unit, "of the datasheet": share}


def _driver() -> str | None:
    """Return the driver's version, the power limit and the highest clocks of the GPU; None without a driver."""
    facts = "driver_version,power.limit,clocks.max.sm,clocks.max.memory"
    command = ["nvidia-smi", f"--query-gpu={facts}", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() if which("nvidia-smi") else None


# Each yields the rows of its table; True: at toy size, on the CPU.
PARTS: Mapping[str, Callable[[bool], Iterator[dict]]] = {
    "peaks": peaks,
    "gpt2": gpt2,
    "gpt2_compiled": gpt2_compiled,
    "profile": where_it_goes,
    "resnet50": resnet50,
    "pipelines": pipelines,
    "planner": planner,
}


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the tables of the parts; of several, each is measured by a process of its own, which writes its table."""
    if not chosen.quick and not torch.cuda.is_available():
        raise SystemExit(
            "error: this machine has no GPU that torch can use; --dry-run goes through every part on the CPU"
        )
    parts = chosen.parts or list(PARTS)
    if chosen.quick or len(parts) == 1:
        keep_freed_memory()
        about = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
        about |= {"dry run, whose numbers mean nothing": chosen.quick}
        yield from (Table(f"gpu_{part}", PARTS[part](chosen.quick), {"part": part, **about}) for part in parts)
    elif failed := [part for part in parts if not _in_own_process(part, chosen.output)]:
        raise SystemExit(f"error: parts that failed: {', '.join(failed)}; their rows so far are in {chosen.output}")


def _in_own_process(part: str, folder: Path) -> bool:
    """Return whether the part was measured to its end."""
    command = [sys.executable, "-m", "benchmarks", "gpu", part, "--output", str(folder)]
    try:
        return subprocess.run(command, timeout=LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"error: {part} took longer than {LIMIT_S} s and was ended", file=sys.stderr)
        return False


BENCHMARK = Benchmark(measure, parts=tuple(PARTS))
