"""DPO on a chain: the loss by plain arithmetic, and what a reference is."""

from functools import partial

import pytest
import torch
from torch import nn

from common.errors import ModelError
from models.chain import REFERENCE, Chain, LayerSpec, as_tuple, source_of
from models.gpt2 import gpt2
from models.llama import llama
from models.lora import adapt
from models.losses import IGNORED, SquaredError, TokenCrossEntropy
from models.preference import prefer

CPU = torch.device("cpu")
GPT2 = partial(gpt2, size="tiny", n_layer=2, vocab_size=50)


def plain() -> Chain:
    """A model whose last layer computes no loss."""
    layers = [LayerSpec("in", partial(nn.Embedding, 50, 8)), LayerSpec("out", partial(nn.Linear, 8, 50))]
    return Chain(layers, TokenCrossEntropy())


CHAINS = {
    "gpt2": GPT2,
    "llama, whose first layer is a Sequential": partial(llama, size="tiny", n_layer=1, vocab_size=50),
    "adapters": lambda: adapt(GPT2(), 2, 4, 0.0, ["c_attn"], dora=True, modules_to_save=["ln_f"]),
    "no loss in the last layer": plain,
}


def log_probabilities(layers, tokens, targets):
    """Of each answer, [b, 2], from the logits of a plain model."""
    logits = layers(tokens.flatten(0, 1)).log_softmax(dim=-1).view(*tokens.shape, -1)
    each = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (each * (targets != IGNORED)).sum(dim=-1)


@pytest.mark.parametrize("name, smoothing", [*((name, 0.0) for name in CHAINS), ("no loss in the last layer", 0.2)])
def test_loss_and_gradients_are_those_of_arithmetic(name, smoothing):
    base = CHAINS[name]()
    chain, generator = prefer(base, 0.3, smoothing), torch.Generator().manual_seed(0)
    ours, theirs = (each.build(each.names, 7, CPU, torch.float64) for each in (chain, base))
    reference = (base.base or base).build(base.names, 7, CPU, torch.float64)
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
                parameters[name].copy_(parameter)
    tokens, targets = torch.randint(50, (2, 4, 2, 9), generator=generator)
    targets[:, :, :3] = IGNORED
    targets[2] = IGNORED  # a pair whose answers were cut off
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0])  # the last one fills up a batch

    *body, (_, head) = ours.items()
    output = (tokens,)
    for _, layer in body:
        output = as_tuple(layer(*output))
    if hasattr(head, "loss"):
        sums = head.loss(*output, targets, weights)
    else:
        sums = chain.loss(head(*output), targets, weights)
    rewards = 0.3 * (
        log_probabilities(theirs, tokens, targets) - log_probabilities(reference, tokens, targets).detach()
    )
    chosen, rejected = rewards[:2].unbind(dim=1)
    margins = chosen - rejected
    loss = ((1 - smoothing) * (1 + (-margins).exp()).log() + smoothing * (1 + margins.exp()).log()).sum()
    assert sums.count == 2 and sums.loss.item() == pytest.approx(loss.item(), rel=1e-12)
    wanted = [each.sum().item() for each in (chosen, rejected, margins, margins > 0)]
    assert [metric.item() for metric in sums.metrics] == pytest.approx(wanted, rel=1e-9)
    sums.loss.backward()
    loss.backward()
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(parameters[name].grad, parameter.grad, rtol=1e-9, atol=1e-12), name
    assert not any(parameter.grad is not None for name, parameter in parameters.items() if REFERENCE in name)


@pytest.mark.parametrize("name", CHAINS)
def test_a_reference_has_the_first_numbers_of_its_layer_and_shares_what_is_frozen(name):
    base = CHAINS[name]()
    chain = prefer(base)
    layers = chain.build(chain.names, 7, CPU)
    state, frozen = layers.state_dict(), {name for name, p in base.skeleton().named_parameters() if not p.requires_grad}
    references = [name for name in state if source_of(name) != name]
    assert len(references) == len((base.base or base).skeleton().state_dict())
    assert all(torch.equal(state[name], state[source_of(name)]) for name in references)
    shared = {source_of(n) for n in references if state[n].data_ptr() == state[source_of(n)].data_ptr()}
    assert {base.canonical(name) for name in shared} == frozen
    assert chain.unsaved == base.unsaved.union(references)
    alone = chain.build(chain.names[-1:], 7, CPU).state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in alone.items()), "in another stage"


def test_a_reference_has_no_dropout():
    chain = prefer(GPT2(dropout=0.5))
    tokens = torch.randint(50, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    layer = chain.build(["embedding"], 7, CPU)["embedding"]
    (x, reference), (y, again) = layer(tokens), layer.eval()(tokens)
    assert (x == 0).float().mean() > 0.3 and torch.equal(reference, again) and torch.equal(y, again)


@pytest.mark.parametrize(
    "chain, words, says",
    [
        (plain, {"beta": 0.0}, "model.dpo: beta=0.0 must be above 0"),
        (plain, {"label_smoothing": 0.5}, r"label_smoothing=0.5 in \[0, 0.5\)"),
        (lambda: Chain(plain().layers, SquaredError()), {}, "not SquaredError and the layers in, out"),
        (lambda: Chain(plain().layers[:1], TokenCrossEntropy()), {}, "not TokenCrossEntropy and the layers in"),
    ],
)
def test_what_cannot_be_compared_is_refused(chain, words, says):
    with pytest.raises(ModelError, match=says):
        prefer(chain(), **words)
