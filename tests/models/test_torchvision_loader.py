"""torchvision works also where its compiled extension does not fit the installed torch."""

from __future__ import annotations

import sys

import pytest
import torch

from common.torchvision_loader import load_torchvision


@pytest.fixture(scope="module")
def torchvision():
    return load_torchvision()


def test_a_second_call_gives_the_same_module(torchvision):
    assert load_torchvision() is torchvision is sys.modules["torchvision"]


def test_resnet18_runs_and_learns(torchvision):
    model = torchvision.models.resnet18(num_classes=7)
    output = model(torch.randn(2, 3, 32, 32))
    output.sum().backward()
    assert output.shape == (2, 7)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_transforms_run(torchvision):
    from torchvision.transforms import v2

    assert v2.functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)


def test_another_error_at_import_is_not_hidden(torchvision, monkeypatch):
    def broken(name):
        raise RuntimeError("something else")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(RuntimeError, match="something else"):
        load_torchvision()
