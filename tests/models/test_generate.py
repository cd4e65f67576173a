"""The tokens that a model draws, with and without the keys and values of those before."""

import pytest
import torch
from torch import nn

from models.chain import Layers
from models.generate import Draws, _by_onednn, draw, generate
from models.gpt2 import gpt2
from models.transformer import transformer

CPU = torch.device("cpu")
WORDS = 90


class Successor(nn.Module):
    """The likeliest token is the last one plus 1; ``seen`` are the lengths that came in. Tokens from 8 on pad."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, tokens):
        self.seen.append(tokens.shape[1])
        return nn.functional.one_hot((tokens + 1) % 8, 10) * 2.0 + torch.tensor([0.0] * 8 + [100.0] * 2)


@pytest.fixture
def layers():
    return Layers([("body", Successor()), ("head", nn.Identity())])


def follow(layers, count=6, **draws):
    options = {"positions": 4, "vocab_size": 8, "device": CPU}
    (drawn,) = generate(layers, [[5]], count, Draws(**{"seed": 1, **draws}), **options)
    return drawn


@pytest.mark.parametrize("texts", [1, 2, 9, 40])
def test_several_texts_go_on_as_each_alone_also_where_a_matrix_is_large(texts):
    torch.manual_seed(0)
    large = Layers(
        [("embedding", nn.Embedding(WORDS, 1024)), ("body", nn.Linear(1024, 1100)), ("head", nn.Linear(1100, WORDS))]
    )
    prompts = [[i % WORDS, (7 * i) % WORDS] for i in range(texts)]
    options = {"positions": 4, "vocab_size": WORDS, "device": CPU}
    together = generate(large, prompts, 3, Draws(temperature=0), **options)
    assert together == [generate(large, [one], 3, Draws(temperature=0), **options)[0] for one in prompts]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1024), (3, 1, 1024), (2, 33, 1024)])
def test_products_while_drawing_are_those_of_the_layer_in_its_dtype(shape, bias, autocast):
    torch.manual_seed(0)
    layer, x = nn.Linear(1024, 300, bias=bias), torch.randn(shape)
    with torch.no_grad(), torch.autocast("cpu", enabled=autocast):
        wanted = layer(x)
        with _by_onednn(layer):
            found = layer(x)
    assert found.dtype is wanted.dtype and found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "bias", [torch.arange(600.0).view(300, 2)[:, 0], torch.ones(1)], ids=["a column", "one number"]
)
def test_a_bias_of_any_strides_and_one_for_all_outputs_is_added_while_drawing(bias):
    layer, x = nn.Linear(1024, 300), torch.randn(1, 1, 1024)
    layer.bias = nn.Parameter(bias)
    with torch.no_grad(), _by_onednn(layer):
        torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, bias))


def test_temperature_0_takes_the_likeliest_token_that_is_no_padding(layers):
    assert follow(layers, temperature=0) == [6, 7, 0, 1, 2, 3]
    assert follow(layers, top_k=1) == follow(layers, top_p=1e-6) == [6, 7, 0, 1, 2, 3]


def test_the_model_sees_no_more_than_its_positions(layers):
    follow(layers)
    assert layers["body"].seen == [1, 2, 3, 4, 4, 4]


class WithSum(nn.Module):
    """Passes a scalar along, as a mixture of experts does with its auxiliary loss."""

    def forward(self, x, total=0.0):
        return x, total + x.sum()


def test_layers_may_pass_tuples_and_the_logits_are_the_first_tensor(layers):
    passing = Layers([*layers.items()[:1], ("middle", WithSum()), ("head", WithSum())])
    assert follow(passing, temperature=0) == follow(layers, temperature=0)


def test_one_seed_gives_one_text_and_another_seed_another(layers):
    assert follow(layers, 40) == follow(layers, 40) != follow(layers, 40, seed=2)
    assert set(follow(layers, 400)) == set(range(8))


def drawn(**draws):
    """Which of five tokens of these probabilities come up in 300 draws, and how often the first."""
    logits, generator = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log(), torch.Generator().manual_seed(1)
    tokens = [draw(logits, Draws(**draws), generator) for _ in range(300)]
    return set(tokens), tokens.count(0) / 300


def test_top_p_leaves_the_fewest_likeliest_tokens_that_add_up_to_it():
    assert drawn(top_p=0.39)[0] == {0}
    assert drawn(top_p=0.5)[0] == {0, 1}
    assert drawn(top_p=0.85)[0] == {0, 1, 2}
    assert drawn(top_p=1.0)[0] == {0, 1, 2, 3, 4}
    assert drawn(top_p=0.5)[1] == pytest.approx(0.4 / 0.7, abs=0.08), "in the same proportions"
    assert drawn(top_p=0.85, top_k=2)[0] == {0, 1}, "of those that top_k leaves"


# -- keys and values that are kept -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt2", "transformer"])
def model(request):
    """A model with 24 positions whose weights are large enough for its draws to depend on the text."""
    if request.param == "gpt2":
        chain = gpt2("tiny", n_layer=2, n_embd=32, block_size=24, vocab_size=WORDS + 6)
    else:
        chain = transformer(d_model=32, d_hid=32, n_head=4, n_layer=2, max_len=24, vocab_size=WORDS + 6)
    layers = chain.build(chain.names, 1, CPU).eval()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(3)
    assert chain.continues
    return layers


PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]


def texts(model, prompts, count, *, cached, **draws):
    options = {"positions": 24, "vocab_size": WORDS, "device": CPU}
    return generate(model, prompts, count, Draws(**draws), cached=cached, **options)


@pytest.mark.parametrize("draws", [{"temperature": 0}, {"top_p": 0.9, "seed": 3}], ids=["likeliest", "drawn"])
def test_with_the_cache_the_tokens_are_those_of_computing_the_whole_text_each_time(model, draws):
    """Also of several prompts of different lengths, and where they outgrow the model's positions."""
    kept, whole = (texts(model, PROMPTS, 30, cached=cached, **draws) for cached in (True, False))
    assert kept == whole
    assert len({tuple(text) for text in kept}) == 3 and len(set(kept[0])) > 1


def test_the_cache_computes_one_position_per_token_until_the_positions_are_used_up(model):
    seen = []
    hook = model[model.names[0]].register_forward_hook(lambda layer, given, output: seen.append(tuple(given[0].shape)))
    texts(model, [[1, 2, 3], [4]], 24, cached=True)
    hook.remove()
    assert seen == [(2, 3), *[(2, 1)] * 21, (2, 24), (2, 24)]


def test_a_prompt_alone_goes_on_as_the_first_of_several(model):
    (alone,) = texts(model, PROMPTS[:1], 12, cached=True)
    assert alone == texts(model, PROMPTS, 12, cached=True)[0]


def test_nothing_is_left_of_the_cache(model):
    tokens = torch.randint(0, WORDS, (2, 9))
    with torch.no_grad():
        before = model(tokens)
        texts(model, PROMPTS, 3, cached=True)
        assert torch.equal(model(tokens), before)
