"""Models whose layers pass tuples of tensors on: recomputed, in bf16, and what their borders are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Layout, weights_of
from cells import RECIPES
from small_models import unet_batch
from torch import nn

from models.chain import Chain, LayerSpec
from models.losses import SquaredError, Sums
from parallel.shape_inference import trace
from parallel.stage import Stage

TUPLE_MODELS = ("unet", "translator")
PIPELINED = Layout("pipelined", pp=2, chunks=4, schedule="1f1b")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("model", TUPLE_MODELS)
def test_activation_recomputation_gives_the_same_bits(trained, model, schedule):
    layout = replace(PIPELINED, schedule=schedule)
    plain, again = trained(layout, RECIPES[model]), trained(layout, replace(RECIPES[model], recompute=True))
    assert again[0].losses == plain[0].losses
    for name, tensor in weights_of(plain).items():
        assert torch.equal(weights_of(again)[name], tensor), name


@pytest.mark.parametrize("model", TUPLE_MODELS)
def test_the_first_step_in_bf16_is_that_of_one_process(trained, model):
    recipe = replace(RECIPES[model], precision="bf16", steps=1, eval_every=1)
    (reference,) = trained(PIPELINED.same_cut, recipe)
    run = trained(PIPELINED, recipe)
    assert run[0].losses == pytest.approx(reference.losses, rel=1e-5)
    assert run[0].norms == pytest.approx(reference.norms, rel=1e-5)


class OfTwo(nn.Module):
    """Owns the loss, and takes two tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * scale.unsqueeze(1)

    def loss(self, x: torch.Tensor, scale: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Sums:
        return SquaredError()(self(x, scale), targets, weights)


def test_a_layer_that_owns_the_loss_gets_what_the_layer_before_returned():
    chain = Chain([LayerSpec("scaled", lambda: OfTwo(10))], loss=SquaredError())
    stage = Stage(chain, ["scaled"], seed=1, device=torch.device("cpu"))
    x, scale, targets = torch.randn(4, 10), torch.rand(4), torch.randn(4, 5)
    loss = stage(x, scale, samples=(0, len(targets)), targets=targets)
    assert loss.item() == pytest.approx(SquaredError()(stage.layers(x, scale), targets, None).loss.item())


class Nested(nn.Module):
    def forward(self, x: torch.Tensor) -> dict:
        return {"x": x}


def test_a_layer_that_returns_something_else_is_an_error_that_names_it():
    chain = Chain([LayerSpec("odd", Nested), LayerSpec("last", nn.ReLU)], loss=SquaredError())
    with pytest.raises(TypeError, match="returned a dict; return a tensor or a flat tuple of tensors"):
        trace(chain, unet_batch(2, 1), "fp32", "cpu")
