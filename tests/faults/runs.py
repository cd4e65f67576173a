"""train.py on a tiny GPT-2 with dropout, by its command line, under a plan of faults."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
multiprocessing.set_forkserver_preload(["tests.preloaded"])  # where python -m benchmarks faults begins
sys.path[:0] = [path for path in (str(TESTS), str(TESTS / "training")) if path not in sys.path]

from commandline import Run, Started  # noqa: E402
from faults.inject import arm  # noqa: E402
from faults.plan import Fault, Record  # noqa: E402

RANKS = {"single": 1, "ddp": 2, "pipelined": 2, "pipe_ddp": 4, "fsdp": 2}
SAVE_EVERY = 2
_MODEL = ["model=gpt2", "model.size=tiny", "model.n_layer=2", "model.n_embd=16", "model.n_head=2", "model.dropout=0.1"]
_TEXT = ["model.block_size=16", "model.vocab_size=4096", "data=text", f"data.root='{argparse.__file__}'"]
_WORDS = ["data.vocabulary=words", "data.seq_len=16"]
_TRAIN = ["train.global_batch_size=8", "parallel.chunks=2", "train.precision=fp32", "train.grad_clip=1.0"]
_OFTEN = [f"train.checkpoint_every={SAVE_EVERY}", "train.eval_every=4", "train.eval_batches=2"]
RECIPE = [*_MODEL, *_TEXT, *_WORDS, *_TRAIN, *_OFTEN, "logger=none", "device=cpu", "train.epochs=null"]


@dataclass
class Ended:
    """A run that has ended, the plan's traces, and the processes that it has left behind (there should be none)."""

    run: Run
    record: Record
    left: list[str]
    at: float


def launch(
    strategy: str, steps: int, folder: Path, faults: Sequence[Fault] = (), *more: str, timeout_s: float = 300.0
) -> Ended:
    """``train.py`` with the run directory ``folder/run`` to its end, every fault of the plan striking once.

    A second call with the same ``folder`` and other faults goes on with the same run, if ``more`` says so.
    """
    number = len(list(folder.glob("faults-*")))
    record = Record(folder / f"faults-{number}")
    record.write(list(faults))
    env = {"FAULTS": str(record.folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = [f"parallel={strategy}", *RECIPE, f"data.cache_dir='{folder.parent}/cache'", f"train.steps={steps}"]
    started = Started([*arguments, *more], folder / "run", env=env, tag=f"console-{number}", before=arm)
    try:
        run = started.wait(timeout_s)
        at = time.time()
        time.sleep(0.2)
        left = [" ".join(process.cmdline())[:100] for process in started.family()]
        return Ended(run, record, left, at)
    finally:
        started.kill()
