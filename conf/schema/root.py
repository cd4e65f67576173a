"""What stands outside the groups: seed, device, mode, and the training section."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


class Mode(Enum):
    train = "train"
    eval = "eval"
    plan = "plan"
    export = "export"
    sample = "sample"


class Precision(Enum):
    auto = "auto"
    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@dataclass
class Train:
    steps: int | None = None  # optimizer steps; with epochs set too, whichever comes first
    epochs: float | None = None  # passes over the training data; parts of one count in whole steps
    global_batch_size: int = 64  # samples per optimizer step over all replicas (sequences, for a language model)
    precision: Precision = Precision.auto  # auto: bf16 where the device is fast at it, else fp32
    grad_clip: float | None = None  # largest norm of the whole model's gradient
    clip_value: float | None = None  # largest absolute value of a gradient element, before grad_clip
    max_skipped: int = 10  # steps in a row that are skipped, as their loss or gradient is not finite, before giving up
    spike_factor: float | None = None  # skip steps whose loss is above so many times the mean of some twenty before it
    spike_rollback: int | None = None  # so many spikes in a row: go back to the newest checkpoint's weights
    compile: bool = False  # torch.compile, layer by layer
    activation_checkpointing: bool = False  # recompute each layer's activations in the backward
    deterministic: bool = False  # same machine, same seed, same bits
    tf32: bool = False  # fp32 products in TF32 where a GPU has it: 10 bits of mantissa, several times as fast
    cudnn_benchmark: bool = False  # let cuDNN try its convolutions and keep the fastest (fixed shapes only)
    detect_anomaly: bool = False  # name the operation whose backward gave a NaN (slow)
    overfit: bool = False  # the first step's batch, over and over
    profile: int = 0  # steps to record with torch.profiler, after three of warm-up; the trace lies in the run directory
    trace: bool = False  # draw when each forward, backward and transfer of a pipeline ran: timeline.png, timeline.json
    eval_every: int | None = 0  # steps between evaluations; 0: only at the end; null: never
    eval_batches: int | None = None  # batches of an evaluation; null: the whole split
    checkpoint_every: int | None = 0  # steps between checkpoints; 0: only at the end; null: never
    keep_checkpoints: int = 3  # the newest so many are kept
    resume: str | None = None  # auto: this run directory's newest checkpoint; or the path of one


@dataclass
class Sample:
    """For mode=sample."""

    prompt: str = ""  # the text to go on from; GPT-2 can do without
    tokens: int = 100  # how many to draw
    temperature: float = 1.0  # logits are divided by it; 0: always the likeliest token
    top_k: int | None = None  # draw among the so many likeliest tokens; null: all


@dataclass
class Root:
    seed: int = 1337
    device: Device = Device.auto
    mode: Mode = Mode.train
    checkpoint: str | None = None  # for mode=eval, export and sample: a checkpoint or a run directory
    export_to: str = "export"  # for mode=export: a folder in the run directory
    sample: Sample = field(default_factory=Sample)
    train: Train = field(default_factory=Train)
    model: Any = None
    parallel: Any = None
    data: Any = None
    optim: Any = None
    scheduler: Any = None
    logger: Any = None
    launcher: Any = None


def register(store: ConfigStore) -> None:
    store.store(group="schema", name="root", node=Root)
