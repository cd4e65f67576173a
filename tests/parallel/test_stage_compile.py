"""train.compile: how often a stage is compiled. The compiler only traces here: generating code takes minutes."""

import pytest
import torch
import torch._dynamo.config
from torch import nn

from models.losses import SquaredError
from models.resnet50 import resnet50
from models.sequential import chain_of
from models.transformer import transformer
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


@pytest.mark.slow
def test_dropout_draws_the_same_masks_compiled(tracing):
    chain = transformer(d_model=16, d_hid=16, n_head=2, n_layer=1, dropout=0.2, vocab_size=50)
    tokens = torch.arange(32).view(4, 8)
    losses = []
    for compiled in (False, True):
        stage = Stage(chain, chain.names, seed=1, device=torch.device("cpu"))
        if compiled:
            stage.compile(random=True)
        for first in (0, 4):
            stage.begin(training=True, step=1)
            losses.append(stage(tokens, samples=(first, 4), targets=tokens).item())
            stage.end()
    assert losses[2:] == losses[:2] and losses[0] != losses[1]


@pytest.mark.slow
def test_an_encoder_layer_of_torch_is_evaluated_in_half_precision():
    net = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    chain = chain_of(net, SquaredError())
    x, losses = torch.randn(3, 4, 8), []
    for compiled in (False, True):
        stage = Stage(chain, chain.names, seed=1, device=torch.device("cpu"))
        if compiled:
            stage.compile(random=False)
        stage.begin(training=False)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            losses.append(stage(x, samples=(0, 3), targets=x).item())
        stage.end()
    torch.backends.mha.set_fastpath_enabled(True)
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
