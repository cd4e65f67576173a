"""GPT-2: its sizes, its initialisation, and Hugging Face's model as an outside reference."""

from __future__ import annotations

import math

import pytest
import torch

from data.images import load_torchvision
from models.gpt2 import gpt2
from models.huggingface import HuggingFaceGPT2, pad

CPU = torch.device("cpu")
SMALL = dict(size="tiny", n_layer=3, n_head=4, n_embd=32, block_size=48)


def build(seed: int = 5, **numbers):
    chain = gpt2(**numbers)
    return chain.build(chain.names, seed, CPU).eval()


def test_a_number_that_is_given_replaces_the_size_s_own():
    chain = gpt2(**SMALL, vocab_size=100)
    assert chain.names == ["embedding", "h.0", "h.1", "h.2", "head"]
    assert chain.limits == {"positions": 48, "vocabulary": 100}
    assert chain.skeleton()["h.1"].mlp.c_fc.weight.shape == (128, 32)


def test_the_untrained_loss_is_that_of_a_guess_among_all_words():
    layers = build(size="tiny", vocab_size=2000)
    tokens = torch.randint(0, 2000, (4, 65), generator=torch.Generator().manual_seed(0))
    logits = layers(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(2000), rel=0.01)


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


def load(layers, theirs) -> None:
    """As a rank does: every tensor of its own, the tied one under its canonical name."""
    kind = HuggingFaceGPT2
    for name, tensor in layers.named_parameters():
        converted = kind.convert(name, theirs[kind.their_name(name)])
        tensor.copy_(pad(converted, len(tensor)) if name == "embedding.wte.weight" else converted)


@torch.no_grad()
def test_a_vocabulary_padded_to_50304_gives_the_same_logits_for_the_50257_words():
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    load_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    reference = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=48)).eval()
    ours = build(size="tiny", n_layer=1, n_head=2, n_embd=8, block_size=48)
    load(ours, reference.state_dict())
    tokens = tokens_below(50257)
    logits, wanted = ours(tokens), reference(tokens).logits
    assert logits.shape[-1] == 50304
    assert (logits[..., :50257] - wanted).abs().max() < 1e-5 * wanted.abs().max()
    back, _ = HuggingFaceGPT2({}).export(dict(ours.named_parameters()), 50257)
    theirs = reference.state_dict()
    assert theirs.keys() - back.keys() == {"lm_head.weight"}, "which is tied"
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in back.items())


def test_padded_rows_are_the_mean_row():
    rows = torch.randn(97, 32)
    assert torch.equal(pad(rows, 104), torch.cat([rows, rows.mean(dim=0, keepdim=True).expand(7, -1)]))


def test_a_checkpoint_with_more_words_than_the_model_is_an_error_that_names_both():
    with pytest.raises(ValueError, match="the checkpoint has 97 words, model.vocab_size=90 is too few"):
        pad(torch.randn(97, 32), 90)
