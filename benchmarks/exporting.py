"""Every model in every format that is served: its differences from torch, the size of the files, the seconds.

    python -m benchmarks exporting [--quick]

Each model is trained for a step as conf/ has it (ResNet-50 on images of 224 pixels), exported by ``train.py``, and
computed by torch.export's program or by ONNX Runtime on the CPU.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.table import Benchmark, Table
from benchmarks.trainer import composed
from conf import options
from training.export.served import ServedModel, serve, session_of
from training.run.restore import restore

FORMATS = {"torch_export": "model.pt2", "onnx": "model.onnx", "triton": "1/model.onnx"}
SIZES = {"resnet50": ["data.image_size=224"]}
QUICK = {"resnet50": ["data.image_size=64"], "gpt2": ["model.size=tiny"]}
TRAINING = [
    "logger=none", "device=cpu", "train.epochs=null", "train.steps=1", "train.eval_every=null",
    "train.global_batch_size=2", "train.precision=fp32",
]  # fmt: skip


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all models."""
    sizes = QUICK if chosen.quick else SIZES
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in options("model") if name != "transformers"]  # which needs a model of theirs
        rows = (row for name in names for row in exported(name, sizes.get(name, []), Path(folder)))
        yield Table("exporting", rows)


def exported(name: str, sizes: list[str], folder: Path) -> Iterator[dict]:
    """Train a model, export it in each format, and yield a row for each."""
    line = [f"model={name}", *sizes, *TRAINING]
    _run(line, folder / name)
    line += ["mode=export", f"checkpoint='{folder / name}'"]
    restored = restore(composed(line), "cpu")
    model = serve(name, restored.data, restored.strategy)
    for form, file in FORMATS.items():
        place = folder / f"{name}-{form}"
        start = time.perf_counter()
        _run([*line, f"export.format={form}"], place)
        seconds = time.perf_counter() - start
        path = place / "export" / (name if form == "triton" else "") / file
        run = torch.export.load(path).module() if path.suffix == ".pt2" else session_of(path, model)
        size = sum(path.stat().st_size for path in (place / "export").rglob("*") if path.is_file())
        yield {
            "`model=`": f"`{name}`",
            "format": f"`{form}`",
            **compare(model, run),
            "MB": f"{size / 1e6:.2f}",
            "seconds": f"{seconds:.1f}",
        }


@torch.no_grad()
def compare(model: ServedModel, run: Callable[..., Tensor]) -> dict[str, str]:
    """Return the differences in batches of 1 and 5."""
    row, same = {}, True
    for batch in (1, 5):
        inputs = model.example(batch)
        wanted, given = model.answer(*inputs), run(*inputs)
        row[f"batch of {batch}"] = f"{(given - wanted).abs().max() / wanted.abs().max():.1e}"
        same &= torch.equal(given.argmax(-1), wanted.argmax(-1))
    return row | {"same classes": "yes" if same else "no"}


def _run(line: list[str], folder: Path) -> None:
    from train import main as train

    if train([*line, f"hydra.run.dir='{folder}'"]):
        raise SystemExit(f"train.py {' '.join(line)} failed")


BENCHMARK = Benchmark(measure)
