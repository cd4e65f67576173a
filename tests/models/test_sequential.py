"""A model that exists already, as a chain: its weights, in any cut."""

import pickle

import pytest
import torch
from torch import nn

from common.errors import ModelError
from data.dataset import Batch
from models.chain import Chain, LayerSpec
from models.losses import ClassCrossEntropy
from models.sequential import chain_of
from parallel.shape_inference import trace

CPU = torch.device("cpu")


def network() -> nn.Sequential:
    """With a BatchNorm whose statistics have moved, a frozen weight, and two modules that stand at two places."""
    relu, linear = nn.ReLU(), nn.Linear(4, 4)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), relu, nn.Flatten(), nn.Linear(16, 4), relu, linear, linear,
        nn.Linear(4, 2),
    )  # fmt: skip
    net[4].weight.requires_grad_(False)
    net(torch.randn(8, 1, 4, 4))
    return net.eval()


def _tied_by_data() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data = net[0].weight.data
    return net


class _Extra(nn.Linear):
    def get_extra_state(self) -> dict:
        return {"version": 2}


class _Called(nn.Sequential):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)


class _Scaled(nn.Sequential):
    """Has a parameter beside its children, which a hook uses."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor([3.0]))
        self.register_forward_hook(_times_scale)


def _times_scale(net, inputs, output):
    return net.scale * output


class _Evaluating(nn.Sequential):
    """Leaves its second child in evaluation mode."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[1].eval()
        return self


class _Named(nn.Sequential):
    """Has an attribute of its own, which changes nothing."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.width = 4


def test_a_chain_computes_what_the_network_computes_and_shares_no_memory_with_it():
    net, images = network(), torch.randn(3, 1, 4, 4)
    chain = chain_of(net, ClassCrossEntropy())
    layers = chain.build(chain.names, 1, CPU).eval()
    assert torch.equal(layers(images), net(images))
    assert set(layers.state_dict()) == set(net.state_dict())
    with torch.no_grad():
        layers["0"].weight.zero_()
    assert net[0].weight.any()


def test_hooks_modes_memory_and_kinds_of_numbers_are_those_of_the_network():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(16, 2)).double()
    net[1].register_forward_hook(lambda layer, inputs, output: 2 * output)
    for name in ("float32", "bfloat16", "complex128", "uint16", "float8_e4m3fn"):
        net[4].register_buffer(f"in_{name}", torch.full((2,), 3.0).to(getattr(torch, name)))
    net.to(memory_format=torch.channels_last)[2].eval()
    chain, images = chain_of(net, ClassCrossEntropy()), torch.randn(3, 2, 4, 4, dtype=torch.float64)
    layers = chain.build(chain.names, 1, CPU, torch.float64)
    assert chain.channels_last and torch.allclose(layers(images), net(images), rtol=1e-14)
    assert [layer.training for layer in layers.children()] == [True, True, False, True, True]
    built, given = layers.state_dict(), net.state_dict()
    assert all(torch.equal(built[name], tensor) for name, tensor in given.items() if not name.startswith("1."))
    kept = chain.build(chain.names, 1, CPU)["4"]
    assert kept.weight.dtype == torch.float32 and kept.in_bfloat16.dtype == torch.bfloat16
    in_float, buffer = nn.Sequential(nn.Linear(2, 2)), torch.rand(2, dtype=torch.float64)
    in_float[0].register_buffer("table", buffer)
    assert torch.equal(chain_of(in_float, ClassCrossEntropy()).build(["0"], 1, CPU)["0"].table, buffer)


def test_what_stands_twice_is_tied_and_what_is_frozen_stays_so():
    chain = chain_of(network(), ClassCrossEntropy())
    assert chain.tied == {"7.weight": "6.weight", "7.bias": "6.bias"}
    layers = chain.build(chain.names, 1, CPU)
    assert layers["7"].weight is layers["6"].weight
    assert [name for name, p in layers.named_parameters() if not p.requires_grad] == ["4.weight"]


def test_its_shapes_are_inferred_without_its_weights_and_it_can_be_sent_to_another_process():
    chain = pickle.loads(pickle.dumps(chain_of(network(), ClassCrossEntropy())))
    traced = trace(chain, Batch(torch.randn(3, 1, 4, 4), torch.zeros(3, dtype=torch.int64)), "bf16", "cpu")
    assert traced[0].outputs[0].dtype == torch.bfloat16 and traced[-2].outputs[0].shape == (3, 4)


@pytest.mark.parametrize(
    "layer, words",
    [
        (nn.SyncBatchNorm(4), "'1' is a SyncBatchNorm"),
        (nn.Sequential(*[nn.BatchNorm1d(4)] * 2), "'1.0': the same BatchNorm stands at 2 places"),
    ],
)
def test_what_would_depend_on_the_layout_is_refused(layer, words):
    with pytest.raises(ValueError, match=words):
        chain_of(nn.Sequential(nn.Linear(4, 4), layer), ClassCrossEntropy())


def test_parameters_that_a_copy_would_train_otherwise_are_refused():
    hooked, complex_one = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64)
    hooked.weight.register_hook(lambda gradient: 0 * gradient)
    refused = {
        hooked: ".weight has a hook for its gradient",
        complex_one: ".weight is complex",
        _Extra(4, 4): r"' \(_Extra\) has get_extra_state\(\)",
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()): ".0.weight is float32 and .*1.weight is bfloat16",
        nn.Embedding(4, 4, sparse=True): " has sparse gradients",
        nn.Embedding(4, 4, scale_grad_by_freq=True): " divides gradients by how often a word occurs",
        torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4)): "' is compiled by TorchScript, .*give the nn.Module",
        nn.ModuleDict({"b/c": nn.Linear(4, 4)}): ".b/c.weight: a checkpoint has .* after a slash; rename the module",
        _tied_by_data(): ".*weight and .*weight share their memory.*assign a.weight = b.weight",
    }
    for layer, words in refused.items():
        with pytest.raises(ModelError, match=words):
            chain_of(nn.Sequential(layer), ClassCrossEntropy())
        with pytest.raises(ModelError, match=f"a{words}"):
            Chain([LayerSpec("a", lambda layer=layer: layer)], ClassCrossEntropy()).skeleton()


@pytest.mark.parametrize("kind", [_Called, _Scaled, _Evaluating])
def test_a_sequential_that_does_more_than_its_children_is_one_layer(kind):
    net, x = kind(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(3, 4)
    chain = chain_of(net, ClassCrossEntropy())
    layers = chain.build(chain.names, 1, CPU)
    layers.train(kind is _Evaluating)
    assert chain.names == ["module"] and torch.equal(layers(x), net.train(kind is _Evaluating)(x))


def test_a_sequential_with_attributes_of_its_own_is_cut_into_its_children():
    assert chain_of(_Named(nn.Linear(4, 4), nn.Linear(4, 2)), ClassCrossEntropy()).names == ["0", "1"]
