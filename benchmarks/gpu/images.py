"""ResNet-50: images/s at 224 pixels, and the published batches of 120 images of 128 pixels, beside torchvision's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpt2 import has_compiler
from benchmarks.gpu.gpt2 import OURS, free_memory
from benchmarks.plain import Loss, PlainLoop
from benchmarks.timing import Spread, paired, take_turns
from benchmarks.trainer import Trainer, configured
from common.torchvision_loader import load_torchvision

TORCHVISION = "torchvision, plain loop"
CLASSES, PUBLISHED_BATCHES = 1000, 3
STEPS, WARM_UP = 10, 5  # cuDNN tries its algorithms in the first


def rows(toy: bool) -> Iterator[dict]:
    """Yield the rows of each run and batch."""
    batch, pixels = (4, 32) if toy else (256, 224)
    modern = ["model.loss=cross_entropy", "train.precision=bf16"]
    for compiled in (False, True):
        if not compiled or (not toy and has_compiler()):
            yield from _both(toy, f"{pixels} pixels", batch, pixels, modern, F.cross_entropy, compiled)
    batch, pixels = (4, 40) if toy else (120, 128)
    name = f"published: {batch} images of {pixels} pixels, fp32"
    yield from _both(toy, name, batch, pixels, ["train.precision=fp32"], _squared_error, compiled=False)


def _both(
    toy: bool, name: str, batch: int, pixels: int, overrides: list[str], criterion: Loss, compiled: bool
) -> Iterator[dict]:
    """Yield this project's row and, where it is installed, torchvision's; both took turns on one device."""
    free_memory()
    trainer = Trainer(
        configured(
            [
                "model=resnet50", f"data.image_size={pixels}", f"train.global_batch_size={batch}",
                f"data.samples={2 * batch}", "train.eval_every=null", "train.tf32=true", f"train.compile={compiled}",
                f"train.cudnn_benchmark={not toy}", f"device={'cpu' if toy else 'cuda'}", "logger=none", *overrides,
            ]
        )
    )  # fmt: skip
    steps: dict[str, Callable[[int], object]] = {OURS: trainer.step}
    try:
        steps[TORCHVISION] = _torchvision(trainer, criterion, compiled).step
    except ImportError as error:
        print(f"no row of torchvision's plain loop: {error}", flush=True)
    seconds = take_turns(steps, 1 if toy else STEPS, 1 if toy else WARM_UP)
    for run, values in seconds.items():
        spread = Spread.of(values)
        faster = f"{paired(seconds, run, TORCHVISION):.2f}x" if TORCHVISION in seconds else ""
        yield {
            "run": run,
            "images": name,
            "batch": batch,
            "compiled": compiled,
            **spread.columns(),
            "images/s": f"{batch / spread.median:,.1f}",
            f"seconds for {PUBLISHED_BATCHES} batches": f"{PUBLISHED_BATCHES * spread.median:.3f}",
            "as fast as torchvision's": faster,
        }


def _torchvision(trainer: Trainer, criterion: Loss, compiled: bool) -> PlainLoop:
    load_torchvision()
    from torchvision.models import resnet50

    model = resnet50(num_classes=CLASSES).to(trainer.strategy.device, memory_format=torch.channels_last)

    def loss(images: Tensor, classes: Tensor) -> Tensor:
        return criterion(model(images.contiguous(memory_format=torch.channels_last)), classes)

    optimizer = torch.optim.SGD(model.parameters(), lr=trainer.optimizer.base_lr, fused=True)
    return PlainLoop(trainer, loss, optimizer, compiled)


def _squared_error(output: Tensor, classes: Tensor) -> Tensor:
    return F.mse_loss(output, F.one_hot(classes, CLASSES).to(output.dtype))
