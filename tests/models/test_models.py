"""Every model is what it says: its published size, the logits of an outside reference, the same wherever it is cut."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from common.packages import load_torchvision
from models.chain import Chain
from models.classifier import classifier
from models.convnet import convnet
from models.gpt2 import gpt2
from models.llama import llama
from models.resnet50 import resnet50
from models.toy import toy
from models.transformer import transformer

CPU = torch.device("cpu")
SMALL_GPT2 = dict(size="tiny", n_layer=3, n_head=4, n_embd=32, block_size=48, vocab_size=97)
SMALL_LLAMA = dict(n_layer=3, n_head=4, kv_heads=2, head_dim=8, n_embd=24, mlp_width=40, block_size=48, vocab_size=97)
SMALL_TRANSFORMER = dict(d_model=24, d_hid=40, n_head=4, n_layer=2, max_len=32, vocab_size=211, dropout=0.0)


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(count: int, length: int = 20) -> Tensor:
    return torch.randint(0, count, (3, length), generator=drawn(2))


def images(channels: int, size: int) -> Tensor:
    return torch.randn(4, channels, size, size, generator=drawn(0), dtype=torch.float64)


class PublishedConvnet(nn.Module):
    """The MNIST network as the tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


def torchvisions() -> nn.Module:
    load_torchvision()
    from torchvision.models import resnet50 as reference

    return reference()


def by_name(ours: nn.Module, theirs: nn.Module) -> None:
    assert {k: t.shape for k, t in ours.state_dict().items()} == {k: t.shape for k, t in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())


@dataclass(frozen=True)
class Model:
    """reference  makes a model of others; ``sample`` is a batch of inputs"""

    chain: Chain
    sample: Tensor
    reference: Callable[[], nn.Module] | None = None


MODELS = {
    "toy": Model(toy(), torch.randn(3, 10, generator=drawn(1), dtype=torch.float64)),
    "gpt2": Model(gpt2(**SMALL_GPT2), words(97)),  # each kind beside Hugging Face's: test_gpt2, test_llama
    "llama": Model(llama(**SMALL_LLAMA), words(97)),
    "transformer": Model(transformer(**SMALL_TRANSFORMER), words(211)),  # its layer's: test_transformer
    "resnet50": Model(resnet50(), images(3, 40), torchvisions),
    "classifier": Model(classifier(), images(3, 32)),
    "convnet": Model(convnet(), images(1, 28), PublishedConvnet),
}
SIZES = [  # of what others publish by name: test_published_configs
    (gpt2(size="124M"), 124_439_808 + (50304 - 50257) * 768),  # rows of padding in the one tied weight
    (transformer(d_model=4096, d_hid=4096, n_head=16, n_layer=8, vocab_size=28_782), 1_041_444_974),
    (resnet50(), 25_557_032),
    (llama(), 7_226_496),
]
SHAPES = [
    (transformer(**SMALL_TRANSFORMER), words(211), (3, 20, 211), {"positions": 32, "vocabulary": 211}),
    (resnet50(in_channels=1, num_classes=10), images(1, 28), (4, 10), {"channels": 1, "classes": 10}),
    *(
        (make(in_channels=channels, image_size=size, num_classes=7), images(channels, size), (4, 7),
         {"channels": channels, "image_size": size, "classes": 7})
        for make in (classifier, convnet)
        for channels, size in ((3, 32), (1, 8), (1, 30))
    ),
]  # fmt: skip


@pytest.mark.parametrize("chain, parameters", SIZES, ids=lambda value: value if isinstance(value, int) else "")
def test_it_has_the_published_number_of_trainable_parameters(chain, parameters):
    layers = chain.skeleton()
    assert all(p.device.type == "meta" for p in layers.parameters())
    assert sum(p.numel() for p in layers.parameters() if p.requires_grad) == parameters


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.reference])
def test_logits_are_the_reference_s_with_its_weights_in_evaluation_and_in_training(name):
    model = MODELS[name]
    torch.manual_seed(4)
    theirs, ours = model.reference().double(), model.chain.build(model.chain.names, 3, CPU, torch.float64)
    theirs.train()(model.sample)  # running statistics away from their initial values
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=drawn(9), dtype=torch.float64))
    by_name(ours, theirs)
    for training in (False, True):
        wanted = theirs.train(training)(model.sample)
        assert wanted.std() > 0.05
        torch.testing.assert_close(ours.train(training)(model.sample), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_wherever_it_is_cut_it_has_the_weights_and_the_output_of_the_whole(name):
    chain, sample = MODELS[name].chain, MODELS[name].sample
    whole = chain.build(chain.names, 7, CPU, torch.float64).eval()
    state, wanted = whole.state_dict(), whole(sample)
    for cut in range(1, len(chain.names)) if len(chain.names) < 10 else (1, 11):
        parts = [chain.build(names, 7, CPU, torch.float64).eval() for names in (chain.names[:cut], chain.names[cut:])]
        first, second = (part.state_dict() for part in parts)
        assert first.keys() | second.keys() == state.keys() and not first.keys() & second.keys()
        assert all(torch.equal(tensor, state[key]) for key, tensor in (first | second).items())
        assert torch.equal(parts[1](parts[0](sample)), wanted)


@pytest.mark.parametrize("chain, sample, shape, limits", SHAPES, ids=lambda v: len(v) if isinstance(v, tuple) else "")
def test_what_is_asked_for_becomes_logits_and_limits(chain, sample, shape, limits):
    inputs = sample.float() if sample.is_floating_point() else sample
    assert chain.skeleton()(inputs.to("meta")).shape == shape
    assert chain.limits == limits


@pytest.mark.parametrize("name", ["gpt2", "transformer"])
def test_the_last_layer_s_own_loss_is_the_cross_entropy_of_its_logits(name):
    chain, text, weights = MODELS[name].chain, words(97, 21), torch.tensor([1.0, 0.0, 1.0])
    *_, (_, head) = chain.build(chain.names, 1, CPU).items()
    if head.projection.bias is not None:
        nn.init.normal_(head.projection.bias)
    hidden = chain.build(chain.names[:-1], 1, CPU)(text[:, :-1]).detach()
    fused, plain = head.loss(hidden, text[:, 1:], weights), chain.loss(head(hidden), text[:, 1:], weights)
    assert fused.count == plain.count == 40
    assert fused.loss.item() == pytest.approx(plain.loss.item(), rel=1e-6)
    parameters = list(head.parameters())
    wanted = torch.autograd.grad(plain.loss, parameters)
    for value, reference in zip(torch.autograd.grad(fused.loss, parameters), wanted, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-5, atol=1e-5)
