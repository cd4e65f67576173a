"""Small models that are trained for a step and exported, for the tests of what is served."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commandline import ROOT
from composed import config, execute, run
from torch import Tensor

from training.export.served import ServedModel, serve
from training.run.restore import restore

ONNX = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime", "transformers")),
    reason="onnx, onnxscript, onnxruntime and transformers are extras: pip install -r requirements-serving.txt",
)


def serving(test):
    """A test for `pytest -m serving`."""
    return pytest.mark.serving(ONNX(test))


# Overrides, and the input's name and shape without the batch.
MODELS = {
    "toy": ([], "inputs", (10,)),
    "convnet": ([], "images", (1, 28, 28)),
    "classifier": (["data=random_images", "model.num_classes=12", "data.num_classes=11"], "images", (3, 32, 32)),
    "resnet50": (["model.num_classes=7", "data.image_size=40", "model.loss=cross_entropy"], "images", (3, 40, 40)),
    "transformer": (["model.d_model=16", "model.d_hid=16", "model.n_layer=1", "model.max_len=40"], "tokens", (7,)),
    "llama": (["model.n_layer=2", "model.n_embd=32", "model.head_dim=8", "model.block_size=40"], "tokens", (7,)),
    "gpt2": (["model.size=tiny", "model.n_layer=2", "model.n_embd=32", "model.block_size=40"], "tokens", (7,)),
}


class Exporter:
    """Trains each model once, and exports it as often as one likes."""

    def __init__(self, folder: Path, text: list[str]) -> None:
        self.folder, self.text = folder, text
        self._restored = {}

    def trained(self, name: str) -> tuple[list[str], Path]:
        """A model's overrides, and its run directory after one step."""
        overrides, takes, _ = MODELS[name]
        data = self.text if takes == "tokens" else ["data.samples=4"] if takes == "images" and name != "convnet" else []
        line = [f"model={name}", *overrides, *data, "train.global_batch_size=4", "train.precision=fp32"]
        folder = self.folder / name
        if not folder.exists():
            run(folder, *line, "train.epochs=null", "train.steps=1", "train.eval_every=null")
        return line, folder

    def export(self, name: str, form: str, place: Path, *more: str) -> Path:
        """Export into the run directory ``place``; returns the folder that is written."""
        overrides, folder = self.trained(name)
        place.mkdir(exist_ok=True)
        line = [*overrides, "mode=export", f"checkpoint='{folder}'", f"export.format={form}", *more]
        execute(config(*line), place, None)
        return place / "export"

    def reference(self, name: str, inputs: Tensor) -> Tensor:
        """What the checkpoint's model computes, without the padding of its vocabulary."""
        if name not in self._restored:
            overrides, folder = self.trained(name)
            self._restored[name] = restore(config(*overrides, "mode=export", f"checkpoint='{folder}'"), "cpu")
        stage, data = self._restored[name].strategy.stages[0], self._restored[name].data
        with torch.no_grad():
            return stage.eval().layers(inputs)[..., : data.vocab_size]


def batches(name: str) -> list[Tensor]:
    """Inputs of one sample and of five; for a language model also of other lengths."""
    random = torch.Generator().manual_seed(1)
    _, takes, shape = MODELS[name]
    if takes == "tokens":
        return [torch.randint(0, 200, (b, t), generator=random) for b, t in ((1, 7), (5, 7), (2, 40), (1, 1))]
    return [torch.randn(b, *shape, generator=random) for b in (1, 5)]


def assert_same(given: Tensor, wanted: Tensor) -> None:
    """Equal to 1e-5 of the largest output (or absolute), with the same likeliest classes."""
    assert given.shape == wanted.shape
    assert (given - wanted).abs().max() <= 1e-5 * max(1, wanted.abs().max())
    assert torch.equal(given.argmax(-1), wanted.argmax(-1))


def translator_of_the_docs() -> ServedModel:
    """The model of two inputs that docs/own_model.md writes, small and untrained, to be served."""
    page = (ROOT / "docs" / "own_model.md").read_text()
    blocks = dict(re.findall(r"^`([\w/.]+)`:\n\n```python\n(.*?)```", page, flags=re.S | re.M))
    model, data = {}, {}
    exec(blocks["models/translator.py"], model)
    exec(blocks["data/backwards.py"], data)
    chain = model["translator"](width=8, n_layer=1, n_head=2)
    stage = SimpleNamespace(layers=chain.build(chain.names, seed=1, device=torch.device("cpu")))
    return serve("translator", data["Backwards"](samples=40), SimpleNamespace(chain=chain, stages=[stage]))


def two_inputs(batch: int) -> tuple[Tensor, Tensor]:
    """Inputs of the translator."""
    source, target = torch.randint(16, (2, batch, 8), generator=torch.Generator().manual_seed(2))
    return source, target
