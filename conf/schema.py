"""The schemas of the configuration. An unknown key or a wrong type is an error before any process starts.

Sections that are fixed (the root with ``train``, ``export`` and ``sample``, ``parallel``, ``launcher``) have a
dataclass here, with the meaning of each key. Every other section names a ``_target_``; its keys, with their defaults
and meanings, are listed in its YAML, and ``conf.instantiate`` checks values against the signature of the target.
"""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from conf import MODES
from models.resolvers import RESOLVERS

if TYPE_CHECKING:  # what functions get is plain data, with the names of choices
    Device = Mode = Precision = Format = Positions = Direction = Split = Tested = Order = Context = CommHook = (
        Schedule
    ) = str
else:

    class _Choice(Enum):
        @staticmethod
        def _generate_next_value_(name: str, *_) -> str:
            return name

    Device = _Choice("Device", "auto cpu cuda mps")
    Mode = _Choice("Mode", " ".join(MODES))
    Precision = _Choice("Precision", "auto fp64 fp32 bf16 bf16_residual fp16")
    Format = _Choice("Format", "safetensors torch_export onnx triton peft")
    Positions = _Choice("Positions", "all last")
    Direction = _Choice("Direction", "minimize maximize")
    Tested = _Choice("Tested", "last best")
    Split = _Choice("Split", "train val test")
    Order = _Choice("Order", "dp_pp pp_dp")
    Context = _Choice("Context", "gather ulysses ring")
    CommHook = _Choice("CommHook", "none bf16 fp16 hierarchical hierarchical_bf16")
    Schedule = _Choice("Schedule", "gpipe 1f1b interleaved_1f1b looped_bfs interleaved_zero_bubble planned")


REPEAT = ["seed", "*.fold"]


class Section:
    """The base of the schemas. Sections are OmegaConf's mappings, which can only be read after composition."""

    if TYPE_CHECKING:

        def __getitem__(self, key: str) -> Any: ...

        def get(self, key: str, default: Any = None) -> Any:
            """Return the value of a key."""

        def keys(self) -> KeysView[str]:
            """Return the names of the keys."""
            ...


@dataclass
class Train(Section):
    """How a model is trained, for every model and in every layout."""

    steps: int | None = None  # optimizer steps; if epochs is set too, the run ends with whichever comes first
    epochs: float | None = None  # passes over the training data; fractions are rounded up to whole steps
    global_batch_size: int = 64  # samples per optimizer step over all replicas (sequences, for a language model)
    precision: Precision = "auto"  # number format; auto: bf16 if the device is fast at it, otherwise fp32
    grad_clip: float | None = None  # largest norm of the whole model's gradient
    clip_value: float | None = None  # largest absolute value of a gradient element, before grad_clip
    max_skipped: int = 10  # the run ends after more skipped steps in a row (loss or gradient not finite, or no target)
    label_smoothing: float | None = None  # of a language model: the part of each target that all words share
    z_loss: float | None = None  # of a language model: factor of logsumexp(logits)^2, such as 1e-4
    spike_factor: float | None = None  # skip steps whose loss exceeds this multiple of the mean of the last 20 or so
    spike_rollback: int | None = None  # spikes in a row after which the newest checkpoint's weights are loaded
    compile: bool = False  # compile each layer with torch.compile
    activation_checkpointing: bool = False  # recompute each layer's activations in the backward
    deterministic: bool = False  # give the same bits in every run with the same seed on the same machine
    tf32: bool = False  # compute fp32 products in TF32 on GPUs that have it (10 bits of mantissa, much faster)
    cudnn_benchmark: bool = False  # let cuDNN try its convolutions and keep the fastest (fixed shapes only)
    detect_anomaly: bool = False  # name the operation whose backward gave a NaN (slow)
    overfit: bool = False  # train on the first step's batch in every step
    profile: int = 0  # steps to record with torch.profiler, after three of warm-up, into the run directory
    trace: bool = False  # draw when each forward, backward and transfer of a pipeline ran: timeline.png, timeline.json
    eval_every: int | None = 0  # steps between evaluations; 0: only at the end; null: never
    eval_batches: int | None = None  # batches of an evaluation; null: the whole split
    checkpoint_every: int | None = 0  # steps between checkpoints; 0: only at the end; null: never
    keep_checkpoints: int = 3  # how many of the newest checkpoints are kept, besides the best one
    monitor: str | None = None  # the metric of an evaluation that decides checkpoints/best; null: val_loss
    monitor_direction: Direction | None = None  # what is better; null: by the metric's name (more accuracy, less loss)
    test: Tested = "last"  # the weights of the test at the end: those of the last step, or checkpoints/best
    unfreeze: Any = None  # modules that are trained only after a step: {20: [head, layer4]}; all others from the start
    resume: str | None = None  # resume from auto (newest checkpoint of this directory), a run directory or a checkpoint


@dataclass
class Sample(Section):
    """Settings of mode=sample, and of the text that a language model writes at the end of its training."""

    prompt: str = ""  # the text to continue, or the JSON of a chat's messages; may be empty for GPT-2
    prompts: list[str] | None = None  # several texts to continue at once, in place of prompt: ["def main", "class A"]
    tokens: int = 100  # number of tokens to draw for each prompt
    temperature: float = 0.8  # logits are divided by it; 0: always the likeliest token
    top_k: int | None = 200  # draw among this many of the likeliest tokens; null: all
    at_end: int = 40  # tokens to draw at a training run's end; 0: none
    top_p: float = 1.0  # draw among the likeliest tokens whose probabilities add up to this much; 1: all
    seed: int | None = None  # seed of the draws; null: the run's seed
    cache: bool = True  # keep keys and values from token to token; false: compute the whole text for each token


@dataclass
class Predict(Section):
    """Settings of mode=predict."""

    split: Split = "test"  # the samples to predict
    targets: bool = False  # write the targets, too, if outputs are arrays


@dataclass
class Export(Section):
    """Settings of mode=export."""

    format: Format = "safetensors"  # weights, a program of torch, ONNX, a repository for Triton, or LoRA adapters
    max_batch_size: int = 8  # for format=triton: samples that the server may compute at once
    positions: Positions = "all"  # tokens whose logits a served language model returns


@dataclass
class Verify(Section):
    """Settings of mode=verify."""

    processes: int | None = None  # the largest number of processes of a layout; null: 4, or the number of GPUs
    steps: int = 2  # optimizer steps of each run
    tolerance: float = 1e-5  # tensors are equal up to this difference, relative to the largest absolute value
    timeout_s: float = 60.0  # seconds that a rank waits for another before its layout is ended


@dataclass
class Sweep(Section):
    """The objective by which the jobs of a sweep (-m) are compared, and which a sweeper such as optuna gets."""

    objective: str | None = None  # a number such as val_accuracy or step_time_s; null: train.monitor (docs/sweeps.md)
    direction: Direction | None = None  # what is better; null: by the objective's name (more accuracy, more speed)
    repeat: list[str] = field(default_factory=REPEAT.copy)  # jobs that differ only in these keys are averaged


@dataclass
class Root(Section):
    """The whole configuration."""

    seed: int = 1337  # seed of initial weights, the order of samples, dropout and augmentation
    device: Device = "auto"  # where to compute; auto: the best available device
    mode: Mode = "train"  # what the command does
    checkpoint: str | None = None  # for mode=eval, predict, export and sample: a checkpoint or a run directory
    export_to: str = "export"  # for mode=export: a new folder; a relative path is in the run directory
    export: Export = field(default_factory=Export)
    print_config: bool = False  # print the whole configuration at the start, not only the words that were typed
    sample: Sample = field(default_factory=Sample)
    predict: Predict = field(default_factory=Predict)
    train: Train = field(default_factory=Train)
    sweep: Sweep = field(default_factory=Sweep)
    verify: Verify = field(default_factory=Verify)
    model: Any = None
    parallel: Any = None
    data: Any = None
    optim: Any = None
    scheduler: Any = None
    logger: Any = None
    loggers: Any = None  # the loggers after the first, by name; logger=[wandb,csv] sets them
    recipe: str | None = None  # the recipe that is used, a name in recipes; null: none
    recipes: Any = None  # values that the model's file sets in other groups: {NAME: {says: …, adamw: {lr: 6e-4}}}
    metrics: Any = None  # of whole evaluations: [MulticlassAUROC, {_target_: mypackage.f}] (docs/predictions.md)
    callbacks: Any = None  # callbacks=[early_stop] sets them by name; or a list of sections with a _target_
    launcher: Any = None
    cluster: Any = None  # the description of a cluster, for which parallel=auto plans; null: measure this machine
    allow: Any = None  # has no effect; kept because .hydra/config.yaml of older runs may contain it
    import_from: Any = None  # folders of code, searched after others; set by the program


@dataclass
class Parallel(Section):
    """The layout of a run, and its processes. A strategy is an option of ``parallel`` that sets some of these keys."""

    name: str = "single"  # the strategy; parallel=NAME sets it
    dp: int | None = 1  # replicas; null: as many as the devices allow (on a CPU: 2)
    tp: int = 1  # processes that share every layer, each with a part of its matrices (tensor parallelism)
    ep: int = 1  # replicas that share the experts of a mixture of experts, in groups of so many; it divides dp
    sequence: bool = False  # with tp: each of its processes has a part of the sequence between the matrices
    cp: int = 1  # processes that share every sequence, each with a part of its positions (context parallelism)
    context: Context = "gather"  # with cp, exchange of keys and values: gather, ulysses (by heads) or ring
    pp: int = 1  # processes of a pipeline, which run stages_per_rank stages each; model_parallel: stages in one process
    chunks: Any = 1  # micro-batches per replica and step (gradient accumulation without a pipeline); auto: the fastest
    schedule: Schedule = "gpipe"  # order of forwards and backwards in a pipeline
    stages_per_rank: int | None = None  # stages of each rank; null: 1 for gpipe and 1f1b, otherwise 2
    balance: Any = "uniform"  # how layers are divided into stages: uniform, time or size (measured), or [7,7]
    order: Order = "dp_pp"  # dp_pp: consecutive ranks are the stages of a pipeline; pp_dp: the replicas of a stage
    devices: list[str] | None = None  # model_parallel: one per stage, such as [cuda:0,cuda:1]; data_parallel: all
    threads: int | None = None  # CPU threads of each process; null: an equal part of the cores
    timeout_s: float = 300.0  # seconds that a rank waits for another before the run ends
    bucket_mb: float = 25.0  # size of the buckets in which gradients are averaged, in MiB
    comm_hook: CommHook = "none"  # how gradients are sent; none: as they are; hierarchical: first within nodes
    shard: int | None = None  # replicas that share one copy of the parameters; null: all; for hsdp: those of one node
    reshard: bool | None = None  # free a layer's gathered parameters after its forward; null: not in a pipeline
    sync_batchnorm: bool = False  # BatchNorm statistics over the micro-batches of all replicas together
    axes: Any = None  # further axes, of your own: {mirror: {_target_: mine.Mirror, ranks: 2}}
    strategy: Any = None  # a strategy of your own: {_target_: mine.CheckedDDP, replicas: true}; name: its name
    env: Any = None  # environment variables of the workers, such as {NCCL_DEBUG: INFO, GLOO_SOCKET_IFNAME: eth0}


@dataclass
class Local(Section):
    """Processes on this machine."""

    name: str = "local"  # the launcher; launcher=NAME sets it
    max_restarts: int = 0  # how often a run resumes by itself after a process has died
    allow_mixed: bool = False  # warn, instead of refusing, if ranks differ in code, versions, data or weights


@dataclass
class Slurm(Section):
    """A job on a SLURM cluster."""

    name: str = "slurm"  # the launcher; launcher=NAME sets it
    nodes: int = 1  # number of machines
    tasks_per_node: int | None = None  # processes of each node; null: all processes, divided by the nodes
    cpus_per_task: int | None = None  # CPU cores of each process; null: the cluster's default
    mem_gb: float | None = None  # memory of each node; null: the cluster's default
    gpus_per_node: int | None = None  # GPUs of each node; null: none
    partition: str | None = None  # the partition that runs the job; null: the cluster's default
    account: str | None = None  # the account that is charged; null: the user's default
    qos: str | None = None  # the quality of service; null: the account's default
    time_min: int = 60  # time limit in minutes; at its end the job saves, is queued again and resumes
    signal_s: int = 120  # seconds before the limit at which the job is asked to save; SLURM may be up to 60 s early
    max_requeues: int = 100  # how often a job may be queued again after a time limit
    setup: list[str] = field(default_factory=list)  # shell lines before the run, such as ["module load cuda"]
    sbatch: Any = None  # further parameters of sbatch, such as {constraint: a100}
    wait: bool = True  # wait for the job; false: print its number and return at once
    max_parallel: int | None = None  # jobs of a sweep that run at the same time; null: all
    poll_s: float = 2.0  # seconds between two queries of the queue
    allow_mixed: bool = False  # warn, instead of refusing, if ranks differ in code, versions, data or weights


# The schemas that options name in their defaults: /schema/parallel@_here_.
SCHEMAS = {"parallel": Parallel, "launcher/local": Local, "launcher/slurm": Slurm}


@cache  # once per process
def register() -> None:
    """Add the schemas to Hydra's ConfigStore as ``schema/...``, which the files in conf/ name in their defaults."""
    OmegaConf.register_new_resolver("by", _by, replace=True)
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    for path, node in {"root": Root, **SCHEMAS}.items():
        folder, _, name = f"schema/{path}".rpartition("/")
        ConfigStore.instance().store(group=folder, name=name, node=node)


def _by(key: Any, *choices: Any) -> Any:
    """Resolve ``${by:${model.size},tiny,3e-3,124M,6e-4,1e-3}`` to the value after the key, or else to the last one."""
    pairs = dict(zip(choices[0:-1:2], choices[1::2], strict=True))
    return pairs.get(getattr(key, "name", key), choices[-1])
