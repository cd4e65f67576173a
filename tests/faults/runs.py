"""train.py on a tiny GPT-2 with dropout, by its command line, under a plan of faults; and what it has become."""

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
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

    def struck(self, number: int = 0) -> dict | None:
        """What is known of a fault that has struck; None where it had no chance."""
        told = self.record.read(f"struck-{number}")
        return None if told is None or "missed" in told else told

    def wrong(self, code: int | None = None, within_s: float | None = None) -> list[str]:
        """Whatever the run has become: processes left behind, checkpoints that are corrupt, another exit code, an end
        later than ``within_s`` seconds after its fault."""
        found = [f"left behind: {command}" for command in self.left] + corrupt(self.run.folder)
        if code is not None and self.run.code != code:
            found.append(f"exit code {self.run.code}: {self.run.stderr.strip().splitlines()[-1:]}")
        if within_s is not None and self.struck() is None:
            found.append("the fault never struck")
        elif within_s is not None and self.at - self.struck()["time"] > within_s:
            found.append(f"it took {self.at - self.struck()['time']:.1f} s")
        return found


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


def differences(disturbed: Ended, undisturbed: Ended) -> list[str]:
    """In sentences; empty where the final checkpoints and the losses are equal bit for bit and all files are whole."""
    assert undisturbed.run.code == 0, undisturbed.run.console
    found = disturbed.wrong(code=0)
    if disturbed.run.code != 0:
        return found
    if not final_tensors(disturbed.run.folder):
        found.append("there is no final checkpoint")
    ours, theirs = (final_tensors(ended.run.folder) for ended in (disturbed, undisturbed))
    names = sorted(ours.keys() | theirs.keys())
    found += [f"final {name} is another" for name in names if ours.get(name) != theirs.get(name)]
    steps = [line["step"] for line in disturbed.run.steps]
    if steps != list(range(1, len(undisturbed.run.steps) + 1)):
        found.append(f"metrics.jsonl has steps {steps}")
    for name in ("losses", "val_losses"):
        ours, theirs = (getattr(ended.run, name) for ended in (disturbed, undisturbed))
        if ours != theirs:
            first = next(i for i, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b)
            found.append(f"{name} differ from number {first + 1} on: {ours[first:][:1]} and {theirs[first:][:1]}")
    return found


def corrupt(run_dir: Path) -> list[str]:
    """What is wrong with the checkpoints of a run directory: damaged ones, half ones under a final name."""
    found = []
    for folder in sorted((run_dir / "checkpoints").glob("step-*")):
        try:
            files = json.loads((folder / "manifest.json").read_text())["files"]
            bad = [name for name, entry in files.items() if _sha256(folder / name) != entry["sha256"]]
            found += [f"{folder / name} is damaged" for name in bad]
        except (OSError, ValueError, KeyError) as error:
            found.append(f"{folder}: {error!r}")
    latest = run_dir / "checkpoints" / "latest"
    if latest.is_symlink() and not (latest / "manifest.json").exists():
        found.append("checkpoints/latest leads nowhere")
    return found


def final_tensors(run_dir: Path) -> dict[str, str]:
    """The checksum of each file of the newest checkpoint: weights and the optimizer's state."""
    folder = run_dir / "checkpoints" / "latest"
    return {path.name: _sha256(path) for path in folder.glob("*.safetensors")}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
