"""The peers get this project's models, weights and batches."""

import pytest
import torch

from benchmarks import peers
from benchmarks.trainer import Trainer
from models.batchnorm import BatchNorm2d

TOY = ["model=toy", "train.global_batch_size=8"]
RESNET50 = ["model=resnet50", "data.image_size=32", "train.global_batch_size=2"]


def trainer_of(words: list[str]) -> Trainer:
    plain = ["parallel=single", "optim=sgd", "optim.lr=0.1", "train.grad_clip=null"]
    return Trainer.build(0, [*words, *plain, "train.precision=fp32", "device=cpu", "logger=none"])


@pytest.mark.parametrize("words", [TOY, RESNET50])
def test_a_sequential_computes_what_the_model_computes_with_torchs_own_norms_in_its_memory_format(words):
    trainer = trainer_of(words)
    layers = peers.as_sequential(trainer)
    (stage,) = trainer.strategy.stages
    inputs = trainer.batch(1).inputs
    expected = inputs
    for _, layer in stage.layers.items():
        expected = layer(expected)
    assert torch.equal(layers(inputs), expected)
    assert not any(isinstance(module, BatchNorm2d) for module in layers.modules())
    if words is RESNET50:
        assert any(isinstance(module, torch.nn.BatchNorm2d) for module in layers.modules())
        assert layers[0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", peers.NAMES)
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_a_peer_learns_what_one_device_learns(name, checkpoint):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install --no-deps -r benchmarks/requirements.txt")
    trainer = trainer_of(TOY)
    peer = peers.Peer(trainer, name, [2, 1], 4, checkpoint)
    losses = [peer.step(number) for number in (1, 2, 3)]
    peer.close()
    assert losses == pytest.approx([trainer.step(number) for number in (1, 2, 3)], rel=1e-5)
