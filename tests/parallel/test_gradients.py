"""The norm of all gradients is that of float64, on one rank or divided among several."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallel.gradients import Gradients
from parallel.mesh import COPIES, PIPELINE, Mesh
from parallel.placement import Placement


def squared_norm(*gradients, mesh=None):
    layers = nn.ParameterList(torch.empty_like(gradient) for gradient in gradients)
    for parameter, gradient in zip(layers, gradients, strict=True):
        parameter.grad = gradient
    stage = SimpleNamespace(layers=layers, chain=SimpleNamespace(tied={}), device=torch.device("cpu"))
    plan = SimpleNamespace(stages_of=lambda position: [])  # of ties
    gradients = Gradients(plan, [stage], mesh or Mesh({}), 1, whole_on_each_rank)
    return float(gradients.squared_norm())


def whole_on_each_rank(name, tensor):
    return Placement(tensor.shape)


def test_a_norm_of_millions_of_elements_is_that_of_float64_however_they_are_divided():
    large, small = torch.randn(3001, 1003) * 1e-3, torch.randn(77)
    wanted = float(large.double().square().sum() + small.double().square().sum())
    assert squared_norm(large, small) == pytest.approx(wanted, rel=1e-8)
    assert squared_norm(large.t(), small) == pytest.approx(wanted, rel=1e-8), "not contiguous"
    shards = sum(squared_norm(shard) for shard in large.split(877)) + squared_norm(small)
    assert shards == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("index", [0, -1])
def test_an_element_that_is_not_finite_is_seen_wherever_it_is(value, index):
    gradient = torch.ones(300_001)
    gradient[index] = value
    assert not torch.isfinite(torch.tensor(squared_norm(gradient)))


@pytest.mark.parametrize("axis, second", [(COPIES, 0.0), (PIPELINE, 5.0), ("tensor", 0.0)])
def test_of_ranks_that_hold_equal_gradients_one_adds_its_own_and_each_tells_what_is_not_finite(axis, second):
    norms = [squared_norm(torch.tensor([1.0, 2.0]), mesh=Mesh({axis: 2}, rank)) for rank in range(2)]
    assert norms == pytest.approx([5.0, second])
    for rank in range(2):
        assert not math.isfinite(squared_norm(torch.tensor([1.0, math.inf]), mesh=Mesh({axis: 2}, rank)))
