"""GPT-2: its sizes, its initialisation, and Hugging Face's model as an outside reference."""

import math

import pytest
import torch

from conf.instantiate import to_config
from models.gpt2 import gpt2
from models.gpt2_sizes import GPT2
from parallel.pieces import Piece, fill
from tests.models.random_models import random_model
from training.checkpoint.init_from import Weights

CPU = torch.device("cpu")
SMALL = dict(size="tiny", n_layer=3, n_head=4, n_embd=32, block_size=48)
SIZES = dict(n_layer=2, n_head=4, n_embd=32, n_positions=48, bos_token_id=0, eos_token_id=0)


def build(seed: int = 5, **numbers):
    chain = gpt2(**numbers)
    return chain.build(chain.names, seed, CPU).eval()


def test_weights_start_as_in_the_released_code():
    n_layer = 6
    layers = build(size="tiny", n_layer=n_layer, n_embd=128, vocab_size=2000)
    residual = 0.02 / math.sqrt(2 * n_layer)
    checked = set()
    for name, parameter in layers.named_parameters():
        if ".ln_" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight"))))
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            wanted = 0.01 if "wpe" in name else residual if "c_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(wanted, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.03 * wanted, name
            checked.add(wanted)
    assert checked == {0.01, 0.02, residual}


def tokens_below(vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (2, 40), generator=torch.Generator().manual_seed(3))


def published(folder, **options):
    """transformers' model with random weights, each of them, and the folder in which it lies."""
    model = random_model("gpt2", **{**SIZES, "vocab_size": 100, **options})
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def loaded(folder, chain):
    """A chain's layers with a folder's weights, and these."""
    weights = Weights(to_config({"init_from": str(folder), "name": "gpt2"}), chain)
    layers = chain.build(chain.names, 5, CPU).eval()
    for name, tensor in layers.named_parameters():
        fill(Piece.of_whole(tensor), weights[name], name)
    return layers, weights


@torch.no_grad()
def test_a_vocabulary_padded_to_50304_gives_the_same_logits_for_the_50257_words(tmp_path):
    reference, tokens = published(tmp_path, vocab_size=50257), tokens_below(50257)
    chain = gpt2(size=None, **GPT2.read(tmp_path / "config.json") | {"vocab_size": 50304})
    ours, weights = loaded(tmp_path, chain)
    logits, wanted = ours(tokens), reference(tokens).logits
    assert logits.shape[-1] == 50304
    assert (logits[..., :50257] - wanted).abs().max() < 1e-5 * wanted.abs().max()
    rows = ours["embedding"].wte.weight
    assert torch.allclose(rows[50257:], rows[:50257].mean(dim=0)), "padding is the mean row"
    assert torch.equal(weights["embedding.wte.weight"][50250:50300, :], rows[50250:50300]), "and so are a rank's rows"
    matrix = "h.0.attn.c_attn.weight"  # transposed in the file
    assert torch.equal(weights[matrix][4:9, :], ours.get_parameter(matrix)[4:9])
    back, _ = chain.hugging_face.export(dict(ours.named_parameters()), 50257)
    theirs = reference.state_dict()
    assert theirs.keys() - back.keys() == {"lm_head.weight"}, "which is tied"
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in back.items())


SAME = [{}, {"activation_function": "gelu_pytorch_tanh"}, {"reorder_and_upcast_attn": True}, {"n_inner": 128}]


@pytest.mark.parametrize("options", SAME, ids=str)
@torch.no_grad()
def test_what_config_json_may_say_gives_the_logits_of_transformers(tmp_path, options):
    reference, tokens = published(tmp_path, **options).double(), tokens_below(100)
    ours, _ = loaded(tmp_path, gpt2(size=None, **GPT2.read(tmp_path / "config.json")))
    torch.testing.assert_close(ours.double()(tokens), reference(tokens).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("h.0.attn.bias", torch.ones(1, 1, 48, 48).tril(), torch.ones(1, 1, 48, 48)),
        ("h.0.attn.masked_bias", torch.tensor(-1e4, dtype=torch.bfloat16), torch.tensor(-1.0)),
    ],
)
def test_a_buffer_that_follows_from_the_sizes_must_be_what_the_model_computes(name, right, wrong):
    (follows,) = [check for end, check in gpt2(**SMALL).hugging_face.redundant.items() if name.endswith(end)]
    assert follows(right) and not follows(wrong)
