"""The smallest model that can be split: Linear 10-10, ReLU, Linear 10-5."""

from __future__ import annotations

from torch import nn

from models.chain import Chain, LayerSpec, reset_parameters
from models.losses import SquaredError


def toy(in_features: int = 10, hidden: int = 10, out_features: int = 5) -> Chain:
    """Build a chain of three layers, [b, in_features] -> [b, out_features], with squared error.

    The middle layer has no parameters, so with three stages, one stage has nothing to optimize. This is allowed.
    Source: the ToyModel of PyTorch's DDP tutorial.
    """
    return Chain(
        layers=[
            LayerSpec("net1", lambda: nn.Linear(in_features, hidden)),
            LayerSpec("relu", nn.ReLU),
            LayerSpec("net2", lambda: nn.Linear(hidden, out_features)),
        ],
        loss=SquaredError(),
        initialise=reset_parameters,
    )
