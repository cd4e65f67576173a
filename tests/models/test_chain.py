"""A model as a chain: any cut of it holds the weights of the whole."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from data.dataset import Batch
from models.chain import Chain, LayerSpec
from models.gpt2 import gpt2
from models.losses import SquaredError
from models.toy import toy
from parallel.shape_inference import trace
from parallel.stage import Stage

CPU = torch.device("cpu")


def tiny() -> Chain:
    return gpt2(size="tiny", n_layer=2, vocab_size=64)


def test_another_seed_gives_other_weights_and_layers_of_one_kind_differ():
    weights = [tiny().build(["h.0", "h.1"], seed, CPU).state_dict() for seed in (1, 2)]
    name = "attn.c_attn.weight"
    assert not torch.equal(weights[0][f"h.0.{name}"], weights[1][f"h.0.{name}"])
    assert not torch.equal(weights[0][f"h.0.{name}"], weights[0][f"h.1.{name}"])


def test_a_cast_dtype_starts_from_the_same_numbers():
    single, double = (toy().build(["net1"], 1, CPU, dtype) for dtype in (torch.float32, torch.float64))
    assert double["net1"].weight.dtype == torch.float64
    assert torch.equal(double["net1"].weight, single["net1"].weight.double())


def test_building_a_stage_builds_nothing_else():
    built = []

    def layer(name: str) -> LayerSpec:
        def build() -> nn.Module:
            built.append(name)
            return nn.Linear(2, 2)

        return LayerSpec(name, build)

    Chain([layer(name) for name in "abcd"], loss=SquaredError()).build(["b", "c"], 1, CPU)
    assert set(built) == {"b", "c"}


def test_an_unknown_layer_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match=r"no such layers: \['net3'\]; this chain has \['net1', 'relu', 'net2'\]"):
        toy().build(["net1", "net3"], 1, CPU)


def test_layers_of_one_name_are_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"more than once: \['a'\]"):
        Chain([LayerSpec("a", nn.ReLU), LayerSpec("b", nn.ReLU), LayerSpec("a", nn.ReLU)], loss=SquaredError())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))


def test_a_layer_without_reset_parameters_starts_as_its_constructor_makes_it():
    layers = [LayerSpec(f"h.{i}", lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)) for i in range(2)]
    chain = Chain([*layers, LayerSpec("scale", Scale)], loss=SquaredError())
    weights = chain.build(chain.names, 1, CPU).state_dict()
    assert weights["scale.factor"] == 1
    bound = (6 / (8 + 24)) ** 0.5  # as nn.MultiheadAttention: uniform by Xavier's rule, biases 0
    assert 0.8 * bound < weights["h.0.self_attn.in_proj_weight"].abs().max() <= bound
    assert not weights["h.0.self_attn.in_proj_bias"].any() and not weights["h.0.self_attn.out_proj.bias"].any()
    assert not torch.equal(weights["h.0.linear1.weight"], weights["h.1.linear1.weight"])


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    ],
    ids=["fused AdamW", "SGD"],
)
def test_the_head_s_cast_weight_is_kept_for_a_step_and_follows_the_optimizer_after_it(optimizer):
    last = Stage(tiny(), ["head"], seed=7, device=CPU)
    head, weight = last.layers["head"], last.layers["head"].lm_head.weight
    last.begin(training=True, step=1)
    cast = head._weight_as(torch.bfloat16)
    assert head._weight_as(torch.bfloat16) is cast
    assert head._weight_as(torch.float16).dtype == torch.float16
    last.end()
    weight.grad = torch.randn_like(weight)
    optimizer([weight]).step()
    for _ in range(2):  # outside of a step, and in the next
        assert not torch.equal(head._weight_as(torch.bfloat16), cast)
        assert torch.equal(head._weight_as(torch.bfloat16), weight.detach().bfloat16())
        last.begin(training=True, step=2)


class Initialised(nn.Linear):
    """A linear layer of 8 numbers whose constructor draws its weight by a function, and that keeps a tensor."""

    def __init__(self, draw):
        super().__init__(8, 8)
        draw(self.weight)
        self.mask = torch.ones(8).cumsum(0)

    def forward(self, x):
        return super().forward(x) * self.mask


def halved_if_large(weight):
    if weight.max() > 0.1:
        weight.data.mul_(0.5)


def scaled(weight):
    weight.data.div_(weight.std().item())


def by_numpy(weight):
    weight.data.copy_(torch.from_numpy(weight.detach().numpy().round(1)))


INITIALISERS = {
    "trunc_normal_": (partial(nn.init.trunc_normal_, std=0.02), lambda w: 0.01 < w.std() < 0.03),
    "orthogonal_": (nn.init.orthogonal_, lambda w: torch.allclose(w @ w.T, torch.eye(8), atol=1e-5)),
    "sparse_": (partial(nn.init.sparse_, sparsity=0.5), lambda w: ((w == 0).sum(0) == 4).all()),
    "an if": (halved_if_large, lambda w: w.abs().max() < 0.18),
    "item": (scaled, lambda w: torch.isclose(w.std(), torch.tensor(1.0))),
    "numpy": (by_numpy, lambda w: torch.equal(w, (w * 10).round() / 10)),
}


class Orthogonal(nn.Linear):
    def __init__(self):
        super().__init__(32, 96)
        nn.init.orthogonal_(self.weight)


def test_a_decomposition_gives_the_same_numbers_for_every_number_of_threads():
    found, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        layer = LayerSpec("a", Orthogonal)
        found.append(Chain([layer], SquaredError()).build(["a"], 1, CPU)["a"].weight)
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", INITIALISERS)
def test_a_constructor_may_look_at_the_numbers_that_it_draws(name):
    draw, holds = INITIALISERS[name]
    chain = Chain([LayerSpec(f"h.{i}", partial(Initialised, draw)) for i in range(3)], loss=SquaredError())
    before = torch.get_rng_state()
    whole = chain.build(chain.names, 7, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(holds(whole[name].weight) for name in chain.names)
    assert not torch.equal(whole["h.0"].weight, whole["h.1"].weight)
    part = chain.build(["h.1", "h.2"], 7, CPU)
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in part.state_dict().items())
    x, layer = torch.randn(3, 8), part["h.1"]
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias) * torch.arange(1, 9))
    for precision, dtype in (("fp64", torch.float64), ("bf16", torch.float32)):  # what the mask makes of bf16
        traced = trace(chain, Batch(x, x), precision, "cpu")
        assert [(x.shape, x.dtype) for layer in traced[:2] for x in layer.outputs] == [((3, 8), dtype)] * 2


def test_all_layers_are_built_without_memory_once_and_a_copy_for_another_process_has_none_of_them():
    built = []
    chain = Chain([LayerSpec("a", lambda: built.append("a") or nn.Linear(2, 2))], SquaredError())
    assert chain.skeleton() is chain.skeleton() and built == ["a"]
    assert copy.copy(chain).skeleton()["a"] is not chain.skeleton()["a"]
