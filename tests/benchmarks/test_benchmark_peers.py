"""The peers get this project's models, weights and batches."""

import pytest
import torch

from benchmarks import peers
from data.dataset import Batch
from models.batchnorm import BatchNorm2d
from models.resnet50 import resnet50
from models.toy import toy


def test_a_sequential_computes_what_the_chain_computes():
    chain = toy()
    x = torch.randn(4, 10)
    expected = chain.build(chain.names, 1337, torch.device("cpu"))(x)
    assert torch.equal(peers.as_sequential(chain, 1337)(x), expected)


def test_a_sequential_has_torchs_own_batch_norm_and_channels_last():
    layers = peers.as_sequential(resnet50(num_classes=10), 1337)
    norms = [m for m in layers.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert norms and not any(isinstance(norm, BatchNorm2d) for norm in norms)
    assert layers[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", peers.NAMES)
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_a_peer_learns_what_one_device_learns(name, checkpoint):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install --no-deps -r benchmarks/requirements.txt")
    chain = toy()
    batch = Batch(torch.randn(8, 10), torch.randn(8, 5))
    peer = peers.Peer(name, chain, lambda number: batch, [2, 1], 4, seed=1337, lr=0.1, checkpoint=checkpoint)
    losses = [peer.step(number) for number in (1, 2, 3)]
    peer.close()
    assert losses == pytest.approx(one_device(chain, batch), rel=1e-5)


def one_device(chain, batch: Batch) -> list[float]:
    model = peers.as_sequential(chain, 1337)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        sums = chain.loss(model(batch.inputs), batch.targets, None)
        loss = sums.loss / sums.count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
