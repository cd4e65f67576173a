"""What a run needs of this machine, and what no value can be: checked before anything is built."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from common.errors import LaunchError, TrainingError
from common.machine import check_memory
from data.dataset import Batch

if TYPE_CHECKING:
    from data.dataset import DataSet
    from models.chain import Chain

_FEWEST_FILES, _FILES_PER_RANK = 64, 16
_ENOUGH_FILES = 1024
_MOST_EPOCHS = 1e9


def check_values(tree: Any, key: str = "") -> None:
    """Check the values of a plain configuration, whatever their keys.

    Raises:
        TrainingError: A number is not finite or does not fit into 64 bits, or a text holds a NUL byte.
    """
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, item in items:
        where = f"{key}.{name}" if key and isinstance(tree, dict) else f"{key}[{name}]" if key else str(name)
        if isinstance(item, (dict, list)):
            check_values(item, where)
        elif isinstance(item, str) and "\0" in item:
            raise TrainingError(f"{where} holds a NUL byte, which no file and no text can have: take it out")
        elif isinstance(item, float) and not math.isfinite(item):
            raise TrainingError(f"{where}={item} is not finite: give a number, or null where the key may be left empty")
        elif isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise TrainingError(f"{where} is a number of more than 64 bits: give a smaller one")


def check_sections(cfg: Any) -> None:
    """Check that every section of a composed configuration is one, whatever a file or a program has put there.

    Raises:
        TrainingError: It is a word, a number, a list or nothing.
    """
    for key in ("model", "data", "optim", "scheduler", "parallel", "logger", "launcher", "loggers"):
        section = cfg.get(key)
        if not hasattr(section, "keys") and not (key == "loggers" and section is None):
            said = "null" if section is None else section
            raise TrainingError(
                f"{key}={said} stands where a section of keys belongs: choose an option, by {key}=NAME on the command "
                f"line, '- override /{key}: NAME' in a file's defaults list, or load_config('{key}=NAME') from Python"
            )


def check_train(cfg: Any) -> None:
    """Check the rules of the section ``train``, and of restarts. Raises TrainingError."""
    train = cfg.train
    if cfg.mode == "train" and cfg.checkpoint is not None:
        raise TrainingError(
            f"checkpoint={cfg.checkpoint} is for mode=eval, export and sample; to go on with its training: "
            f"train.resume={cfg.checkpoint}, to start from its weights: mode=export, then model.init_from="
        )
    if (recipe := cfg.get("recipe")) is not None and recipe not in (known := cfg.get("recipes") or {}):
        raise TrainingError(f"recipe={recipe}: model={cfg.model.name} has {', '.join(known) or 'none'}")
    restarts = cfg.launcher.get("max_restarts", 0)
    if restarts < 0:
        raise TrainingError(f"launcher.max_restarts={restarts} must be at least 0")
    if train.steps is None and train.epochs is None:
        raise TrainingError("neither train.steps nor train.epochs is set: say how long, for example train.steps=100")
    bounds = {
        "steps": 1, "global_batch_size": 1, "max_skipped": 0, "profile": 0, "keep_checkpoints": 1,
        "eval_every": 0, "checkpoint_every": 0, "eval_batches": 1, "spike_rollback": 1,
    }  # fmt: skip
    for key, least in bounds.items():
        value = train[key]
        if value is not None and value < least:
            raise TrainingError(f"train.{key}={value} must be at least {least}")
    for key in ("epochs", "grad_clip", "clip_value"):
        value = train[key]
        if value is not None and not value > 0:
            raise TrainingError(f"train.{key}={value} must be above 0")
    if train.epochs is not None and train.epochs > _MOST_EPOCHS:
        raise TrainingError(f"train.epochs={train.epochs:g} must be at most {_MOST_EPOCHS:g}")
    if train.spike_factor is not None and not train.spike_factor > 1:
        raise TrainingError(f"train.spike_factor={train.spike_factor} must be above 1, such as 3")
    if train.spike_rollback is not None and train.spike_factor is None:
        raise TrainingError(
            f"train.spike_rollback={train.spike_rollback} needs train.spike_factor, which says what a spike is; set it "
            "to 3 for example"
        )
    if train.deterministic and train.cudnn_benchmark:
        raise TrainingError(
            "train.cudnn_benchmark=true takes whichever algorithm was fastest this time, train.deterministic=true the "
            "same one every time: switch one of them off"
        )


def check_process(processes: int = 1) -> None:
    """Check that this process and its workers may open enough files; raise the limit where that is allowed.

    Args:
        processes: The number of ranks that this machine will run.

    Raises:
        LaunchError: The user's limits are too low.
    """
    import resource  # not on Windows

    wanted = _FEWEST_FILES + _FILES_PER_RANK * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < wanted:
        raise LaunchError(
            f"this process may open {hard} files (ulimit -n), and a run of {processes} processes needs {wanted}; allow "
            f"more: ulimit -n {max(_ENOUGH_FILES, wanted)}"
        )
    enough = max(_ENOUGH_FILES, wanted)
    if soft != unlimited and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough if hard == unlimited else min(enough, hard), hard))


def check_need(setup: Any) -> None:
    """Check that a run whose ranks are all on this machine fits into its memory, before any of them is started.

    Counted is what is certain: processes, weights, gradients and optimizer states, of which GPUs hold all but the
    processes. (mode=plan estimates the whole, which takes seconds.)

    Raises:
        UserError: It does not.
    """
    from parallel.memory import PROCESS_BYTES
    from parallel.precision import parameter_dtype

    plan, cfg = setup.plan, setup.cfg
    needed = plan.processes * PROCESS_BYTES
    if plan.device_type == "cpu":
        copies = plan.dp / plan.mesh(0).shards
        held = copies * sum(stage.parameters for stage in plan.stages) * parameter_dtype(plan.precision).itemsize
        needed += held * certain_tensors(cfg)
    check_memory(
        needed,
        f"model={cfg.model.name} parallel={plan.strategy} in {plan.processes} processes",
        "choose a smaller model or train.global_batch_size, more parallel.chunks, or fewer processes (mode=plan shows "
        "what needs how much)",
    )


def certain_tensors(cfg: Any) -> int:
    """Return how many tensors of a parameter's size a run holds at least."""
    from conf.instantiate import to_dict
    from parallel.memory import tensors_per_parameter

    return tensors_per_parameter(to_dict(cfg.optim), unknown=0) if cfg.mode == "train" else 1


def check_sample(setup: Any) -> None:
    """Check that one micro-batch fits into memory, by one of its samples.

    Raises:
        UserError: It does not.
    """
    import numpy as np  # late: the application imports this module before it knows that it will need any of it

    one = Batch(*setup.data.train.read(np.zeros(1, dtype=np.int64), 0))
    size = sum(tensor.nbytes for tensor in (*one.input_tensors, one.targets))
    count = setup.plan.microbatch_size
    check_memory(
        2 * size * count,
        f"a micro-batch of {count} samples of {size / 2**20:,.1f} MiB",
        "choose more parallel.chunks, a smaller train.global_batch_size or smaller samples",
    )


def check_kind(data: DataSet, model: Any) -> None:
    """Check that both are about tokens or neither is. Raises TrainingError."""
    if (data.seq_len is None) == ("vocab_size" not in model):
        return
    kind = "tokens" if data.seq_len is not None else "numbers"
    raise TrainingError(
        f"model={model.name} does not take the {kind} that this data set gives; leave data= out and the model brings "
        "one that fits"
    )


def check_length(cfg: Any, chain: Chain, data: DataSet) -> None:
    """Check that a sample is no longer than the model's positions. Raises TrainingError."""
    positions = chain.limits.get("positions")
    if positions is not None and data.seq_len > positions:
        raise TrainingError(
            f"data.seq_len={data.seq_len} is longer than the model's {positions} positions; set "
            f"data.seq_len={positions} or less, or give the model more (model.block_size={data.seq_len} of gpt2, "
            f"model.max_len={data.seq_len} of transformer)"
        )


def check_fit(setup: Any) -> None:
    """Check that the model has room for the data's words or classes. Raises TrainingError."""
    chain, data = setup.chain, setup.data
    vocabulary, classes = chain.limits.get("vocabulary"), chain.limits.get("classes")
    if vocabulary is not None and data.vocab_size is not None and data.vocab_size > vocabulary:
        raise TrainingError(
            f"the data has a vocabulary of {data.vocab_size}, model.vocab_size={vocabulary} is too small; set "
            f"model.vocab_size={data.vocab_size} or more"
        )
    given = getattr(data, "num_classes", None)
    if classes is not None and given is not None and given > classes:
        raise TrainingError(
            f"the data has {given} classes, model.num_classes={classes} is too few; set model.num_classes={given} or "
            "more"
        )
