"""train.compile: how often a stage is compiled. The compiler only traces here: generating code takes minutes."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.config

from models.resnet50 import resnet50
from parallel.stage import Stage


@pytest.fixture
def tracing(monkeypatch):
    """What torch would give up on, and run uncompiled, is an error. Its limit is as torch has it."""
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda what, **_: whole(what, backend="eager"))
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("random", [False, True], ids=["all layers together", "each layer by itself"])
def test_every_kind_of_layer_stays_compiled_in_training_and_in_evaluation(tracing, random):
    chain = resnet50(num_classes=10)
    stage = Stage(chain, chain.names, seed=1, device=torch.device("cpu"), dtype=torch.float32)
    stage.compile(random)
    images, classes = torch.randn(2, 3, 64, 64), torch.tensor([1, 2])
    for training in (True, False, True, False):
        stage.begin(training, step=1)
        with torch.set_grad_enabled(training):
            stage(images, samples=(0, 2), targets=classes)
        stage.end()
    sums = stage.take_sums()
    assert sums[1] == 4 * 2 * 10 and torch.isfinite(sums).all()
