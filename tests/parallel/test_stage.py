"""One stage: what it gives, and where its dropout comes from."""

import pytest
import torch
from torch import nn

from common.errors import ModelError
from data.dataset import Batch
from models.chain import LOSS, Chain, LayerSpec
from models.losses import SquaredError, Sums
from parallel.examination import examine
from parallel.stage import Stage

CPU = torch.device("cpu")


def dropouts(count: int = 3) -> Chain:
    return Chain([LayerSpec(f"drop{i}", lambda: nn.Dropout(0.5)) for i in range(count)], loss=SquaredError())


def stage(chain: Chain, names: list[str] | None = None, seed: int = 3, step: int = 1, **more) -> Stage:
    made = Stage(chain, names or chain.names, seed=seed, device=CPU, **more)
    made.step = step
    return made


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def mask(name: str = "drop0", first: int = 0, **more) -> torch.Tensor:
    """What dropout makes of ones in layer ``name``."""
    return stage(dropouts(), [name], **more)(torch.ones(4, 64), samples=(first, 4))


@pytest.mark.parametrize(
    "other", [{"seed": 4}, {"step": 2}, {"first": 4}, {"name": "drop1"}], ids=["seed", "step", "samples", "layer"]
)
def test_a_dropout_mask_depends_on(other):
    assert not torch.equal(mask(**other), first := mask()) and torch.equal(mask(), first)


class Turn(nn.Module):
    """Returns tensors that are not contiguous, or have the strides of channels_last where one channel has no order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2) if x.dim() == 3 else x.permute(0, 3, 1, 2)


class Draw(nn.Module):
    """Draws by itself, in the memory order of what it computes."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.convolution(x) if x.dim() == 4 else x)


@pytest.mark.parametrize("channels_last", [False, True], ids=["plain", "channels_last"])
@pytest.mark.parametrize("shape", [(4, 6, 5), (4, 6, 5, 1), (4, 6, 5, 3)], ids=["transposed", "one channel", "images"])
def test_a_layer_that_turns_its_input_changes_nothing_that_depends_on_the_cut(shape, channels_last):
    layers = [LayerSpec("turn", Turn), LayerSpec("draw", lambda: Draw(shape[-1]))]
    chain = Chain(layers, loss=SquaredError(), channels_last=channels_last)
    x, index = drawn(*shape), (0, 4)
    first, second = stage(chain, ["turn"]), stage(chain, ["draw"])
    assert torch.equal(second(first(x, samples=index).clone(), samples=index), stage(chain)(x, samples=index))


class Noisy(SquaredError):
    """Draws by itself."""

    def __call__(self, output: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> Sums:
        return super().__call__(output + torch.randn_like(output), targets, weights)


def loss_of_noise(first: int = 0, **more) -> torch.Tensor:
    noisy = stage(Chain([LayerSpec("only", nn.Identity)], loss=Noisy()), **more)
    torch.rand(first + 1)  # whatever was drawn before
    return noisy(torch.zeros(4, 5), samples=(first, 4), targets=torch.zeros(4, 5))


def test_what_a_loss_draws_depends_on_the_micro_batch_alone_as_what_a_layer_draws():
    assert torch.equal(loss_of_noise(), loss_of_noise())
    others = [loss_of_noise(), *(loss_of_noise(**other) for other in ({"seed": 4}, {"step": 2}, {"first": 4}))]
    assert len({loss.item() for loss in others}) == 4


def test_evaluation_drops_nothing_and_draws_nothing():
    evaluated = stage(dropouts()).eval()
    before = torch.get_rng_state()
    assert torch.equal(evaluated(torch.ones(4, 64), samples=(0, 4)), torch.ones(4, 64))
    assert torch.equal(torch.get_rng_state(), before)


def test_images_in_channels_last_and_their_gradients_cross_a_border_as_they_lie_in_memory():
    def convolution() -> nn.Module:
        return nn.Conv2d(3, 3, 3)

    layers = [LayerSpec("first", convolution), LayerSpec("relu", nn.ReLU), LayerSpec("last", convolution)]
    chain = Chain(layers, loss=SquaredError(), channels_last=True)
    before, after = stage(chain, ["first", "relu"]), stage(chain, ["last"])
    gradients = []
    before.layers["relu"].register_full_backward_pre_hook(lambda module, given: gradients.extend(given))

    images, index = drawn(2, 3, 8, 9), torch.tensor([[0, 2]])
    sent = before(images, samples=index)
    assert sent.shape == (2, 6, 7, 3) and sent.is_contiguous()
    received = sent.detach().requires_grad_()
    out = after(received, samples=index)
    assert torch.equal(out, stage(chain)(images, samples=index))
    out.square().sum().backward()
    sent.backward(received.grad)
    assert [gradient.is_contiguous(memory_format=torch.channels_last) for gradient in gradients] == [True]


def test_a_hook_computes_each_layer_and_the_loss_with_the_same_random_numbers(monkeypatch):
    called = []

    def hook(stage, name, where, layer, *tensors):
        called.append((name, where))
        return layer(*tensors)

    ones = torch.ones(4, 64)
    plain = stage(dropouts(2))(ones, samples=(8, 4), targets=ones)
    monkeypatch.setattr(Stage, "layer_hook", hook)
    assert torch.equal(stage(dropouts(2))(ones, samples=(8, 4), targets=ones), plain)
    assert called == [("drop0", (8, 4)), ("drop1", (8, 4)), (LOSS, (8, 4))]


class Draws(nn.Module):
    """Ends with an operator that fills a tensor after torch has saved it for the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rrelu(x, training=True)


@pytest.mark.parametrize("layer", [nn.RReLU, Draws])
def test_a_recomputation_does_not_end_before_the_last_operator_has_filled_what_it_saves(layer):
    chain = Chain([LayerSpec("draws", layer), LayerSpec("last", nn.Identity)], SquaredError())
    batch, found = Batch(drawn(4, 64), drawn(4, 64)), []
    for recompute in (False, True):
        x = batch.inputs.clone().requires_grad_()
        made = stage(chain, recompute=recompute, facts=examine(chain, batch).for_plan()["facts"])
        made(x, samples=(0, 4), targets=batch.targets).backward()
        found.append(x.grad)
    assert torch.equal(*found)


class OfGradient(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda z: super(OfGradient, self).forward(z).tanh().sum())(x)


def test_torch_func_in_a_recomputed_layer_is_refused_by_the_layers_name():
    chain = Chain([LayerSpec("penalty", lambda: OfGradient(3, 3))], loss=SquaredError())
    assert stage(chain)(drawn(4, 3), samples=(0, 4)).shape == (4, 3)
    with pytest.raises(ModelError, match=r"layer 'penalty' \(OfGradient\): torch.func .*checkpointing=false"):
        stage(chain, recompute=True)(drawn(4, 3), samples=(0, 4))
