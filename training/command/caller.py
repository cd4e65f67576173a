"""The state of the process of a Python program. A run does not change it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any


@contextmanager
def left_as_it_was() -> Iterator[None]:
    """After the block, restore what a run changes: torch's settings and generators, logging, environment variables."""
    import torch

    backends: Any = torch.backends
    log: Any = vars(logging)
    root, matmul, cudnn = logging.getLogger(), backends.cuda.matmul, backends.cudnn
    with ExitStack() as stack:  # which restores in the reverse order: torch's older settings change its newer ones
        for place in (matmul, cudnn.conv, cudnn.rnn, backends.mkldnn.matmul):
            stack.callback(setattr, place, "fp32_precision", place.fp32_precision)
        with suppress(RuntimeError):  # it cannot be read if a program has used older and newer names
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        for place, name in ((matmul, "allow_tf32"), (cudnn, "allow_tf32"), (cudnn, "benchmark")):
            with suppress(RuntimeError):
                stack.callback(setattr, place, name, getattr(place, name))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        stack.callback(multiprocessing.set_start_method, multiprocessing.get_start_method(allow_none=True), True)
        stack.callback(root.setLevel, root.level)
        stack.callback(root.handlers.__setitem__, slice(None), [*root.handlers])
        # Hydra's configuration of logging closes all handlers of this list (private, Python 3.10 to 3.13).
        stack.callback(log.update, _handlerList=log["_handlerList"])
        log["_handlerList"] = []
        stack.callback(sys.path.__setitem__, slice(None), [*sys.path])
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        stack.enter_context(warnings.catch_warnings())
        # Models that the caller draws after a run must not depend on it.
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        stack.enter_context(torch.random.fork_rng(gpus))
        yield
