"""Shapes and dtypes at stage borders, found without running anything, are those of a real run."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import Recipe
from small_models import chain_and_batches
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from data.dataset import Batch
from models.chain import LOSS, Chain, LayerSpec
from models.losses import SquaredError
from parallel.devices import autocast, between_layers, parameter_dtype
from parallel.examination import examine
from parallel.shape_inference import trace
from planner.counting import Measure

RECIPES = {name: Recipe(name, global_batch=6, lr=0.1) for name in ("toy", "gpt2")}


def traced(model: str, precision: str):
    chain, batch_at = chain_and_batches(RECIPES[model])
    batch = batch_at(0)
    return chain, batch, trace(chain, batch, precision, "cpu", Measure)


@pytest.mark.parametrize(
    "model, precision", [("toy", "fp64"), ("gpt2", "fp32"), ("gpt2", "bf16"), ("gpt2", "bf16_residual")]
)
def test_every_border_is_what_a_real_forward_gives(model, precision):
    chain, batch, borders = traced(model, precision)
    dtype = parameter_dtype(precision)
    layers = chain.build(chain.names, 0, torch.device("cpu"), dtype)
    x = batch.inputs.to(dtype) if batch.inputs.is_floating_point() else batch.inputs
    targets = batch.targets.to(dtype) if batch.targets.is_floating_point() else batch.targets
    real = []
    with autocast(precision, "cpu"):
        for name, layer in layers.items():
            if name != chain.names[-1]:
                x = layer(x).to(between_layers(precision))
            elif hasattr(layer, "loss"):
                x = layer.loss(x, targets, None).loss
            else:
                x = chain.loss(layer(x), targets, None).loss
            real.append([(x.shape, x.dtype, x.requires_grad)])
    assert [[(x.shape, x.dtype, x.requires_grad) for x in t.outputs] for t in borders] == real


def test_casts_of_weights_are_held_once_a_step_and_only_under_autocast():
    plain, cast = ([first.kept - second.kept for _, (first, second) in traced("toy", p)[2]] for p in ("fp32", "bf16"))
    assert plain == [0, 0, 0]
    # The second Linear's weight in two bytes; the first one's backward needs no weight.
    assert cast == [0, 0, 2 * 10 * 5]


def test_each_micro_batch_keeps_its_own_input():
    _, _, plain = traced("toy", "fp32")
    assert plain[0].seen[1].kept == 4 * 6 * 10


class First(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)[0]


RECURRENT = {
    "LSTM": nn.LSTM(128, 256, batch_first=True),
    "LSTM of wide inputs": nn.LSTM(512, 256),
    "two layers in both directions": nn.LSTM(64, 128, 2, bidirectional=True),
    "GRU": nn.GRU(64, 128),
}


@pytest.mark.parametrize("module", RECURRENT.values(), ids=RECURRENT)
def test_a_recurrent_layer_keeps_what_it_keeps_in_a_run(module):
    x, saved = torch.randn(16, 20, module.input_size), {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        module(x)
    layers = [LayerSpec("first", partial(First, module)), LayerSpec("last", nn.Identity)]
    output = module(x)[0]
    kept = trace(Chain(layers, SquaredError()), Batch(x, output), "fp32", "cpu", Measure)[0].seen[1].kept
    assert kept == pytest.approx(sum(tensor.untyped_storage().nbytes() for tensor in saved.values()), rel=0.1)


class Nested(nn.Module):
    def forward(self, x: torch.Tensor) -> dict:
        return {"x": x}


def test_a_layer_that_returns_something_else_is_an_error_that_names_it():
    chain = Chain([LayerSpec("odd", Nested), LayerSpec("last", nn.ReLU)], loss=SquaredError())
    with pytest.raises(TypeError, match="returned a dict; return a tensor or a flat tuple of tensors"):
        trace(chain, Batch(torch.ones(4, 8), torch.ones(4)), "fp32", "cpu")


class Drop(nn.Module):
    """Drops out what a function makes of its input [b, t, c]."""

    def __init__(self, change, p: float = 0.1) -> None:
        super().__init__()
        self.change, self.drop = change, nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.change(x)).sum()


class Draw(nn.Module):
    def __init__(self, draw) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x)


DRAWS = {
    "dropout": (lambda: Drop(lambda x: x), False),
    "dropout of rows": (lambda: Drop(lambda x: x.flatten(0, 1)), False),
    "dropout of nothing": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), False),
    "time before the batch": (lambda: Drop(lambda x: x.transpose(0, 1)), True),
    "weights": (lambda: Drop(lambda x: torch.ones(8, 6)), True),
    "F.dropout": (lambda: Draw(lambda x: F.dropout(x, 0.1)), True),
    "a layer left out": (lambda: Draw(lambda x: x if torch.rand(()) < 0.5 else 2 * x), True),
    "nn.MultiheadAttention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True), True),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.1), True),
    "a module given in evaluation mode": (lambda: nn.AlphaDropout(0.1).eval(), True),
}


@pytest.mark.parametrize("build, draws", DRAWS.values(), ids=DRAWS)
def test_layers_whose_numbers_depend_on_the_micro_batch_are_found(build, draws):
    chain = Chain([LayerSpec("first", nn.Identity), LayerSpec("h.0", build)], loss=SquaredError())
    assert examine(chain, Batch(torch.ones(4, 8, 6), torch.ones(4))).which("draws") == ["h.0"] * draws


class Noisy(SquaredError):
    """Draws by itself."""

    def __call__(self, output, targets, weights):
        return super().__call__(tuple(torch.rand_like(one) for one in output)[0], targets, weights)


def test_a_loss_that_draws_is_found_too():
    chain = Chain([LayerSpec("twice", lambda: Draw(lambda x: (x, x)))], loss=Noisy())
    assert examine(chain, Batch(torch.ones(4, 8), torch.ones(4, 8))).which("draws") == [LOSS]
