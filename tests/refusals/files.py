"""Files that cannot be used: each function returns one that writes them into the folder that it is given."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from file_formats import idx

from training.checkpoint.files import with_checksum

Make = Callable[[Path], object]
MANIFEST = {
    "format": 2,
    "step": 1,
    "seed": 1337,
    "optimizer": "torch.optim.SGD",
    "layout": {
        "parallel": "single", "dp": 1, "pp": 1, "chunks": 1, "precision": "fp32", "stages": [["net1", "relu", "net2"]],
    },
    "tied": {},
    "loss_scale": {"scale": 65536.0, "good_steps": 0},
    "progress": {},
    "files": {},
}  # fmt: skip
CONFIG = {
    "seed": 1,
    "model": {"_target_": "models.toy.toy", "name": "toy", "in_features": 10, "hidden": 10, "out_features": 5},
    "data": {"_target_": "data.random_regression.RandomRegression"},
    "optim": {"_target_": "torch.optim.SGD", "lr": 0.1},
    "scheduler": {"_target_": "training.optimizer.Constant"},
    "train": {},
}


def file(name: str, content: bytes) -> Make:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return make


def option(path: str, text: str) -> Make:
    """``path.yaml``, as in a folder that ``--config-dir`` names."""
    return file(f"{path}.yaml", f"# @package _global_\n{text}\n".encode())


def rows(*lines: str, count: int = 40) -> bytes:
    """These lines of JSON, and rows of text after them up to ``count``."""
    more = [json.dumps({"text": f"row number {i}"}) for i in range(count - len(lines))]
    return "\n".join([*lines, *more]).encode()


def mnist(images: bytes = idx(np.zeros((20, 4, 4), "u1")), labels: bytes = idx(np.arange(20, dtype="u1") % 10)) -> Make:
    """The four files of MNIST, with the same content for training and test."""

    def make(folder: Path) -> None:
        for name in ("train", "t10k"):
            (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
            (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)

    return make


def manifest(text: bytes | None = None, **changes: object) -> Make:
    """The run directory ``run`` with one checkpoint, whose manifest is ``text``, or right but for some entries."""
    content = json.dumps(with_checksum({**MANIFEST, **changes})).encode() if text is None else text

    def make(folder: Path) -> None:
        checkpoint = folder / "run" / "checkpoints" / "step-00000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_bytes(content)

    return make
