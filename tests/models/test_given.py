"""Objects that a Python program gives to the processes of its run."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import is_parametrized

from common.errors import UserError
from models.given import given, pack_given, set_given, unpack_given


def with_lock() -> nn.Module:
    net = nn.Linear(2, 2)
    net.lock = threading.Lock()
    return net


@pytest.fixture
def give():
    yield lambda net: set_given({"model": net})
    set_given(None)


def test_what_cannot_be_sent_is_an_error_that_says_why(give):
    give(with_lock())
    with pytest.raises(UserError, match="model cannot be sent to the run's processes: .*lock"):
        pack_given()


@pytest.mark.parametrize("parametrize", [weight_norm, orthogonal, spectral_norm])
def test_a_parametrized_layer_is_sent_with_its_parametrization(give, parametrize):
    net, x = nn.Sequential(parametrize(nn.Linear(4, 4))).eval(), torch.randn(3, 4)
    give(net)
    packed = pack_given()
    set_given(None)
    unpack_given(packed)
    sent = given("model")
    assert torch.equal(sent(x), net(x)) and sent.state_dict().keys() == net.state_dict().keys()
    assert is_parametrized(sent[0], "weight")
