"""The tutorial's language model: torch's own encoder layer as the reference, under the causal mask it was published
without."""

import math

import pytest
import torch
from torch import nn

from models.transformer import transformer

CPU = torch.device("cpu")
WORDS = 211
SMALL = dict(d_model=24, d_hid=40, n_head=4, n_layer=2, max_len=32, vocab_size=WORDS)


def build(seed: int = 5, names: list[str] | None = None, dtype: torch.dtype = torch.float32, **numbers):
    chain = transformer(**{**SMALL, **numbers})
    return chain.build(names or chain.names, seed, CPU, dtype)


def tokens(length: int = 20) -> torch.Tensor:
    return torch.randint(0, WORDS, (3, length), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def pair():
    """Our first layer and torch's with the same weights (moved away from 0 and 1), in float64."""
    ours = build(names=["layers.0"], dtype=torch.float64, dropout=0.0)["layers.0"]
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
    theirs = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True, dtype=torch.float64)
    theirs.load_state_dict(ours.state_dict())  # strict: the same names and shapes
    return ours, theirs


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_layer_is_torch_s_encoder_layer_under_a_causal_mask(pair, training):
    ours, theirs = (layer.train(training) for layer in pair)
    x = torch.randn(3, 20, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    direction = torch.randn(3, 20, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mask = nn.Transformer.generate_square_subsequent_mask(20, dtype=torch.float64)
    wanted = theirs(x, src_mask=mask, is_causal=True)
    torch.testing.assert_close(ours(x), wanted, rtol=1e-12, atol=1e-12)
    names = [name for name, _ in ours.named_parameters()]
    gradients = torch.autograd.grad((ours(x) * direction).sum(), [x, *ours.parameters()])
    others = dict(theirs.named_parameters())
    wanted_gradients = torch.autograd.grad((wanted * direction).sum(), [x, *(others[name] for name in names)])
    for name, value, reference in zip(["x", *names], gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-10, msg=name)


def test_the_encoder_scales_the_embedding_and_adds_sines_and_cosines():
    encoder = build(names=["encoder"])["encoder"].eval()
    added = encoder(tokens()) - math.sqrt(24) * encoder.embedding(tokens())
    for position in (0, 1, 19):
        for i in (0, 5, 11):
            angle = position / 10000 ** (2 * i / 24)
            assert added[:, position, 2 * i].tolist() == pytest.approx([math.sin(angle)] * 3, abs=1e-6)
            assert added[:, position, 2 * i + 1].tolist() == pytest.approx([math.cos(angle)] * 3, abs=1e-6)


def test_positions_are_no_part_of_a_checkpoint():
    assert [name for name in build().state_dict() if name.startswith("encoder.")] == ["encoder.embedding.weight"]


def test_weights_start_as_published_and_in_the_layers_as_torch_s_own():
    layers = build(d_model=96, d_hid=160, n_head=4)
    bounds = {
        "encoder.embedding.weight": 0.1,
        "decoder.projection.weight": 0.1,
        "layers.0.self_attn.in_proj_weight": math.sqrt(6 / (96 + 3 * 96)),  # Xavier's, of the three as one matrix
        "layers.0.self_attn.out_proj.weight": 1 / math.sqrt(96),
        "layers.0.linear1.weight": 1 / math.sqrt(96),
        "layers.0.linear1.bias": 1 / math.sqrt(96),
        "layers.0.linear2.weight": 1 / math.sqrt(160),
        "layers.0.linear2.bias": 1 / math.sqrt(160),
    }
    values = dict(layers.named_parameters())
    for name, bound in bounds.items():
        value = values.pop(name)
        assert 0.95 * bound < value.abs().max() <= bound, name
        assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15), name
    for name in ("decoder.projection.bias", "layers.0.self_attn.in_proj_bias", "layers.0.self_attn.out_proj.bias"):
        assert not values.pop(name).any(), name
    for name in ("layers.0.norm1", "layers.0.norm2"):
        assert (values.pop(f"{name}.weight") == 1).all() and not values.pop(f"{name}.bias").any()
    assert all(name.startswith("layers.1.") for name in values)


@pytest.mark.parametrize("layer", ["encoder", "layers.0"])
def test_dropout_acts_in_training_only(layer):
    module = build(names=[layer], dropout=0.5)[layer]
    x = tokens() if layer == "encoder" else torch.randn(3, 20, 24)
    assert not torch.equal(module.train()(x), module(x))
    assert torch.equal(module.eval()(x), module(x))
