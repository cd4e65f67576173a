"""The mixture of experts: beside transformers' Mixtral with the same weights, and its products beside plain ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

from common.errors import ModelError
from models.auxiliary import Collected, collecting
from models.grouped import by_expert, product
from models.moe import moe
from tests.models.random_models import POSITIONS, WORDS, random_model

NAMES = {"embedding.": "model.", "layers.": "model.layers.", "head.norm.": "model.norm.", "head.": ""}


def theirs(name: str) -> str:
    ours = next(prefix for prefix in NAMES if name.startswith(prefix))
    return NAMES[ours] + name.removeprefix(ours)


@pytest.mark.parametrize("balance", [0.0, 0.7])
def test_logits_gradients_and_the_balance_of_a_layer_are_those_of_mixtral(balance):
    model = random_model(
        "mixtral", num_hidden_layers=1, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        output_router_logits=True, router_aux_loss_coef=balance,
    ).train()  # fmt: skip
    sizes: Any = dict(n_layer=1, n_embd=64, head_dim=16, expert_width=96, experts=4, tied=False, z_loss=0.0)
    chain = moe(**sizes, balance=balance, block_size=POSITIONS, vocab_size=WORDS)
    layers, state = chain.build(chain.names, 5, torch.device("cpu")), model.state_dict()
    layers.load_state_dict({name: state[theirs(name)] for name in layers.state_dict()})
    tokens = torch.randint(3, WORDS, (2, 41), generator=torch.Generator().manual_seed(3))
    targets = tokens.roll(-1, 1)
    wanted = model(tokens, labels=targets, shift_labels=targets, use_cache=False)
    wanted.loss.backward()
    with collecting(Collected()) as step:
        logits = layers(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for key, added in step.losses.items():
            totals = step.sums[key].requires_grad_()
            (step.gradients[key],) = torch.autograd.grad(value := added(totals), totals)
            loss = loss + value.detach()
        loss.backward()
    assert set(step.losses) == ({"layers.0.mlp.gate"} if balance else set())
    assert (logits - wanted.logits).abs().max() <= 1e-5 * wanted.logits.abs().max()
    assert loss.item() == pytest.approx(wanted.loss.item(), rel=1e-6)
    given = dict(model.named_parameters())
    for name, parameter in layers.named_parameters():
        assert (parameter.grad - given[theirs(name)].grad).norm() <= 2e-5 * given[theirs(name)].grad.norm(), name


CHOICES = {
    "no token": torch.zeros(0, 2, dtype=torch.long),
    "one expert for all": torch.full((5, 1), 2),
    "experts without tokens": torch.tensor([[3, 0], [0, 3], [3, 4]]),
}


@pytest.mark.parametrize("dtype, width", [(torch.float64, 6), (torch.float32, 8), (torch.float32, 5)])
@pytest.mark.parametrize("chosen", CHOICES.values(), ids=CHOICES)
def test_the_product_of_each_expert_is_that_of_each_token_alone(chosen, dtype, width):
    draw = torch.Generator().manual_seed(2)
    n, k = chosen.shape
    x, matrices, weights = (
        torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in ((n, 4), (5, 4, width), (n, k))
    )
    y = by_expert(x, chosen, weights, 5, lambda rows, ends: product(rows, matrices, ends))
    each = [[weights[i, j] * (x[i] @ matrices[e]) for j, e in enumerate(of)] for i, of in enumerate(chosen)]
    wanted = torch.stack([torch.stack(rows).sum(0) for rows in each]) if each else x @ matrices[0]
    assert torch.allclose(y, wanted)
    inputs = (x, matrices, weights)
    found, plain = (torch.autograd.grad(of.square().sum(), inputs, allow_unused=True) for of in (y, wanted))
    for mine, other in zip(found, plain, strict=True):
        assert torch.allclose(mine, torch.zeros_like(mine) if other is None else other)


@pytest.mark.slow
def test_the_shapes_do_not_depend_on_what_tokens_choose():
    chain = moe(n_layer=1, n_embd=16, head_dim=4, expert_width=8, vocab_size=20, block_size=8)
    layers = chain.build(chain.names, 5, torch.device("cpu"))
    tokens = torch.arange(12).view(2, 6)
    compiled = torch.compile(layers.eval(), backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(tokens), layers(tokens), atol=1e-6)
    assert layers.to("meta")(tokens.to("meta")).shape == (2, 6, 20)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(top_k=9), "model.top_k=9 experts compute each token, and there are model.experts=8"),
        (dict(bias_rate=-1.0), "model.bias_rate=-1.0 must be at least 0"),
        (dict(kv_heads=3), "model.kv_heads=3 does not divide model.n_head=4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ModelError, match=said):
        moe(**options)


def test_an_exported_program_needs_no_code_of_this_project():
    chain = moe(n_layer=1, n_embd=16, head_dim=4, expert_width=8, experts=4, block_size=16, vocab_size=WORDS)
    layers, axes = chain.build(chain.names, 5, torch.device("cpu")).eval(), {0: Dim("texts"), 1: Dim("time", max=16)}
    several, one, more = (torch.arange(b * t).view(b, t) for b, t in ((2, 5), (1, 1), (3, 9)))
    program = torch.export.export(layers, (several,), dynamic_shapes=((axes,),), strict=False)
    assert not [node for node in program.graph.nodes if "one_word_parallel" in str(node.target)]
    for tokens in (several, one, more):
        torch.testing.assert_close(program.module()(tokens), layers(tokens))
