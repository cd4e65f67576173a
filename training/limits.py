"""What a run needs of this machine, and what no value can be: checked before anything is built."""

from __future__ import annotations

import math
from typing import Any

from common.errors import LaunchError, TrainingError
from common.machine import check_memory
from data.batch import Batch

_FEWEST_FILES, _FILES_PER_RANK = 64, 16
_ENOUGH_FILES = 1024
_FEWEST_PROCESSES = 32
# Of an estimate: it may be a fifth too high.
_CERTAIN = 0.8


def check_values(tree: Any, key: str = "") -> None:
    """Check the values of a plain configuration that no key can take.

    Args:
        tree: The configuration, or a part of it.
        key: Where the part is.

    Raises:
        TrainingError: For a number that is not finite or does not fit into 64 bits, and for a NUL byte in a text.
    """
    if isinstance(tree, dict):
        for name, item in tree.items():
            check_values(str(name), f"the name of {key or 'a section'}.{str(name)[:40]!r}")
            check_values(item, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list):
        for index, item in enumerate(tree):
            check_values(item, f"{key}[{index}]")
    elif isinstance(tree, str) and "\0" in tree:
        raise TrainingError(f"{key} holds a NUL byte, which no file and no text can have: take it out")
    elif isinstance(tree, float) and not math.isfinite(tree):
        raise TrainingError(f"{key}={tree} is not finite: give a number, or null where the key may be left empty")
    elif isinstance(tree, int) and not -(2**63) <= tree < 2**63:
        raise TrainingError(f"{key} is a number of more than 64 bits: give a smaller one")


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

    On GPUs only what is in main memory counts.

    Raises:
        UserError: It does not.
    """
    from parallel.memory import estimate_memory
    from training.config import to_dict

    estimates = estimate_memory(setup.plan, setup.chain, setup.sample, to_dict(setup.cfg.optim))
    on_cpu = setup.plan.device_type == "cpu"
    weights_only = setup.cfg.mode != "train"
    needed = 0
    for rank in estimates:
        held = rank.weights if weights_only else rank.total - rank.process
        needed += rank.process + (held if on_cpu else 0)
    check_memory(
        _CERTAIN * needed,
        f"model={setup.cfg.model.name} parallel={setup.plan.strategy} in {setup.plan.processes} processes",
        "choose a smaller model or train.global_batch_size, more parallel.chunks, or fewer processes (mode=plan shows "
        "what needs how much)",
    )


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
