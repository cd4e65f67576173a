"""ResNet-50: torchvision's model as an outside reference."""

from __future__ import annotations

import math

import pytest
import torch

from common.torchvision_loader import load_torchvision
from models.batchnorm import BatchNorm2d
from models.losses import ClassCrossEntropy, OneHotSquaredError
from models.resnet50 import resnet50

CPU, DOUBLE = torch.device("cpu"), torch.float64
CHAIN = resnet50()
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)


@pytest.fixture(scope="module")
def ours():
    return CHAIN.build(CHAIN.names, 3, CPU, DOUBLE)


@pytest.fixture(scope="module")
def theirs():
    load_torchvision()
    from torchvision.models import resnet50 as reference

    torch.manual_seed(4)
    model = reference().double()
    model.train()(IMAGES)  # running statistics away from their initial values
    return model


def test_it_has_the_published_number_of_parameters():
    assert sum(p.numel() for p in CHAIN.skeleton().parameters()) == 25_557_032


def test_keys_are_torchvision_s(ours, theirs):
    shapes = [{key: tensor.shape for key, tensor in model.state_dict().items()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


def test_logits_are_torchvision_s_with_its_weights_in_training_and_in_evaluation(ours, theirs):
    ours.load_state_dict(theirs.state_dict())
    for training in (False, True):
        logits = [model.train(training)(IMAGES) for model in (ours, theirs)]
        assert logits[0].shape == (2, 1000)
        torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-10)


def test_torchvision_s_model_loads_our_weights(ours, theirs):
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        logits = [model.eval()(IMAGES) for model in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-10, atol=1e-10)


def test_weights_start_as_torchvision_s():
    layers = CHAIN.build(CHAIN.names, 1, CPU)
    for name, module in layers.named_modules():
        if isinstance(module, torch.nn.Conv2d):
            std = math.sqrt(2 / (module.out_channels * module.kernel_size[0] * module.kernel_size[1]))
            assert module.weight.std().item() == pytest.approx(std, rel=0.03), name
        elif isinstance(module, BatchNorm2d):
            values = (module.weight, module.bias, module.running_mean, module.running_var)
            assert [value.unique().tolist() for value in values] == [[1.0], [0.0], [0.0], [1.0]], name
            assert module.num_batches_tracked == 0
            assert not module.seen.any()
    bound = 1 / math.sqrt(2048)
    assert layers["fc"].weight.abs().max().item() == pytest.approx(bound, rel=1e-3)


def test_a_uniform_split_is_the_published_one():
    assert CHAIN.names[:11] == ["conv1", "bn1", "relu", "maxpool", *(f"layer{g}.{i}" for g, i in _published_half())]
    assert len(CHAIN.names) == 22


def _published_half():
    return [(1, i) for i in range(3)] + [(2, i) for i in range(4)]


def test_no_stage_writes_into_its_input():
    layers = CHAIN.skeleton()
    x = torch.empty(2, 3, 64, 64, device="meta")
    for name, layer in layers.items():
        x = x.detach().requires_grad_()  # as a stage receives it; torch refuses to overwrite it
        version = x._version
        y = layer(x)
        assert x._version == version, name
        x = y
    assert x.shape == (2, 1000)


def test_grey_images_and_few_classes_can_be_asked_for():
    layers = resnet50(in_channels=1, num_classes=10).skeleton()
    assert layers(torch.empty(2, 1, 28, 28, device="meta")).shape == (2, 10)


def test_the_loss_is_squared_error_unless_cross_entropy_is_asked_for():
    assert isinstance(CHAIN.loss, OneHotSquaredError)
    assert isinstance(resnet50(loss="cross_entropy").loss, ClassCrossEntropy)
