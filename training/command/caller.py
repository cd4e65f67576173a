"""The state of the process of a Python program, which a run leaves as it was."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def left_as_it_was() -> Iterator[None]:
    """Restore, however the block ends, what a run changes: torch's settings and random numbers, logging, variables."""
    import torch

    backends: Any = torch.backends
    settings = [(backends.cuda.matmul, "allow_tf32"), (backends.cudnn, "allow_tf32"), (backends.cudnn, "benchmark")]
    newer = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul
    saved, precision = {}, None
    for place, name in (*settings, *((place, "fp32_precision") for place in newer)):
        with suppress(RuntimeError):  # a program has used torch's older and newer names for them
            saved[place, name] = getattr(place, name)
    with suppress(RuntimeError):
        precision = torch.get_float32_matmul_precision()
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    start = multiprocessing.get_start_method(allow_none=True)
    root, variables, path = logging.getLogger(), dict(os.environ), [*sys.path]
    level, handlers = root.level, [*root.handlers]
    # Hydra's configuration of logging closes all handlers of this list (private, Python 3.10 to 3.13) and of no other.
    closed, logging._handlerList = logging._handlerList, []  # pyright: ignore[reportAttributeAccessIssue]
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        # Models that the caller draws after a run must not depend on it.
        with warnings.catch_warnings(), torch.random.fork_rng(gpus):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(deterministic)
        for (place, name), value in saved.items():
            setattr(place, name, value)
            if name == "benchmark" and precision is not None:
                torch.set_float32_matmul_precision(precision)
        multiprocessing.set_start_method(start, force=True)
        logging._handlerList = [*closed, *logging._handlerList]  # pyright: ignore[reportAttributeAccessIssue]
        root.setLevel(level)
        root.handlers[:] = handlers
        sys.path[:] = path
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
