"""LoRA: what is trained, what stays as it was, and what cannot have an adapter."""

import copy
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import ModelError
from models.chain import Chain, LayerSpec
from models.classifier import classifier
from models.gpt2 import gpt2
from models.lora import FrozenLinear, LoRALinear, adapt, merge
from models.losses import ClassCrossEntropy, SquaredError
from models.sequential import chain_of
from models.transformer import transformer

CPU = torch.device("cpu")
GPT2 = partial(gpt2, size="tiny", n_layer=2, vocab_size=100)


class Attends(nn.Module):
    """A layer whose numbers only its constructor can tell, and what torch computes without calling its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.linear = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.attention(x, x, x)[0])


def attends() -> Chain:
    return Chain([LayerSpec("a", Attends), LayerSpec("b", partial(nn.Linear, 8, 2))], SquaredError())


def given() -> Chain:
    torch.manual_seed(3)
    return chain_of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), ClassCrossEntropy())


CHAINS = {
    "gpt2": (GPT2, ["c_attn", "mlp.c_proj"]),
    "classifier": (partial(classifier, image_size=16), ["fc1.1", "fc4"]),
    "transformer": (partial(transformer, d_model=16, d_hid=16, n_head=2, vocab_size=50), None),
    "constructed": (attends, ["linear"]),
    "given": (given, ["2"]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_only_adapters_are_trained_and_all_else_keeps_names_and_numbers(name):
    base, targets = CHAINS[name][0](), CHAINS[name][1]
    chain = adapt(base, 3, 6, 0.0, targets)
    before, after = (c.build(c.names, 7, CPU) for c in (base, chain))
    trained = {n for n, p in after.named_parameters() if p.requires_grad}
    assert trained == after.state_dict().keys() - before.state_dict().keys() and trained
    assert all(n.endswith((".lora_A.weight", ".lora_B.weight")) for n in trained)
    assert all(torch.equal(after.state_dict()[n], t) for n, t in before.state_dict().items())
    assert chain.unsaved == {n for n, _ in before.named_parameters(remove_duplicate=False)}
    zeros = {n for n in trained if not after.state_dict()[n].any()}
    assert zeros == {n for n in trained if "lora_B" in n}, "at first an adapter adds nothing"


def test_a_rank_draws_the_same_factors_whatever_else_it_holds():
    chain = adapt(GPT2(), 3, 6, 0.0, ["c_attn"])
    whole, alone = chain.build(chain.names, 7, CPU).state_dict(), chain.build(["h.1"], 7, CPU).state_dict()
    assert "h.1.attn.c_attn.lora_A.weight" in alone and all(torch.equal(whole[n], t) for n, t in alone.items())
    first, second = (whole[f"h.{i}.attn.c_attn.lora_A.weight"] for i in range(2))
    assert not torch.equal(first, second)


def test_blocks_that_were_alike_stay_alike_and_a_target_may_be_one_of_them():
    def kinds(*targets):
        return len({layer.build for layer in adapt(GPT2(n_layer=4), 3, 6, 0.0, targets).layers})

    assert kinds("c_attn") == 3 and kinds("h.2.attn.c_attn") == 4


def test_a_merged_layer_is_a_plain_one_that_computes_the_same():
    base = GPT2()
    chain = adapt(base, 3, 12, 0.1, ["c_attn", "c_fc"])
    layers = chain.build(chain.names, 7, CPU).eval()
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    linear, x = layers["h.0"].attn.c_attn, torch.randn(5, 64)
    wanted = x @ linear.weight.t() + linear.bias + 12 / 3 * x @ linear.lora_A.weight.t() @ linear.lora_B.weight.t()
    assert torch.allclose(linear(x), wanted, atol=1e-5)
    tokens = torch.arange(20).view(2, 10)
    before = layers(tokens)
    merge(layers)
    assert torch.allclose(layers(tokens), before, atol=1e-5)
    assert layers.state_dict().keys() == base.skeleton().state_dict().keys()
    assert not any(isinstance(module, FrozenLinear) for module in layers.modules())


@pytest.mark.parametrize(
    "chain, words, says",
    [
        (
            GPT2,
            {"targets": ["q_proj"]},
            "q_proj: no layer has that name; those that can have one: c_attn, c_fc, c_proj",
        ),
        (GPT2, {"targets": ["c_attn", "wte"]}, "embedding.wte is a Embedding"),
        (GPT2, {"targets": ["lm_head"]}, "head.lm_head has a tied weight"),
        (CHAINS["transformer"][0], {"targets": ["projection"]}, "decoder.projection is read by another layer"),
        (attends, {"targets": ["out_proj"]}, "a.attention.out_proj is a NonDynamicallyQuantizableLinear"),
        (attends, {"targets": ["linear2"]}, "a.encoder.linear2 is read by another layer"),
        (GPT2, {"rank": 0}, "model.lora.rank=0 must be a whole number of at least 1"),
        (GPT2, {"rank": 2.5}, "model.lora.rank=2.5 must be a whole number"),
        (GPT2, {"dropout": 1.0}, r"model.lora.dropout=1.0 in \[0, 1\)"),
    ],
)
def test_what_would_have_no_effect_is_refused(chain, words, says):
    with pytest.raises(ModelError, match=says):
        adapt(chain(), **{"rank": 4, "alpha": 8, "dropout": 0.0, "targets": None, **words})


class Products(TorchDispatchMode):
    """Counts products of matrices by the shape of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("frozen", [False, True])
def test_the_gradient_of_a_frozen_weight_is_not_computed(frozen):
    chain = GPT2()
    chain = adapt(chain, 3, 6, 0.0, ["h.0.attn.c_attn"]) if frozen else chain
    layers = chain.build(chain.names, 7, CPU)
    hidden = layers["h.1"](layers["h.0"](layers["embedding"](torch.arange(20).view(2, 10))))
    loss = layers["head"].loss(hidden, torch.arange(20).view(2, 10), None).loss
    with Products() as products:
        loss.backward()
    assert ((100, 64) in products.shapes) is not frozen, "of the head"
    assert ((256, 64) in products.shapes) is not frozen, "of c_fc"


def test_a_frozen_layer_under_autocast_has_the_plain_one_s_bits_and_keeps_no_cast():
    torch.manual_seed(0)
    plain, x = nn.Linear(64, 48).requires_grad_(False), torch.randn(2, 5, 64)
    answers = []
    for kind in (nn.Linear, FrozenLinear):
        plain.__class__, kept = kind, []
        own = x.clone().requires_grad_()
        with saved_tensors_hooks(lambda t, kept=kept: (kept.append(t), t)[1], lambda t: t):
            with torch.autocast("cpu", torch.bfloat16):
                output = plain(own)
        output.backward(torch.ones_like(output))
        casts = [t for t in kept if t.numel() == plain.weight.numel() and t.dtype == torch.bfloat16]
        answers.append((output, own.grad, len(casts)))
    (output, gradient, casts), (ours, our_gradient, our_casts) = answers
    assert torch.equal(ours, output) and torch.equal(our_gradient, gradient) and ours.dtype == torch.bfloat16
    assert casts == 1 and our_casts == 0


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True])
def test_dora_and_modules_to_save_have_peft_s_outputs_and_gradients(drops):
    peft = pytest.importorskip("peft", reason="peft is a test dependency (requirements-dev.txt)")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3)).double()
    lora = {"r": 2, "lora_alpha": 6, "lora_dropout": 0.3 * drops, "target_modules": ["0", "2"]}
    lora |= {"use_dora": True, "modules_to_save": ["4"]}
    theirs = peft.get_peft_model(copy.deepcopy(net), peft.LoraConfig(**lora))
    chain = adapt(chain_of(net, SquaredError()), 2, 6, 0.3 * drops, ["0", "2"], dora=True, modules_to_save=["4"])
    ours = chain.build(chain.names, 7, CPU, torch.float64)
    trained = {name: parameter for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    named = {re.sub(r"base_model\.model\.|\.default|\.modules_to_save", "", name): p for name, p in trained.items()}
    named = {name.removesuffix(".weight") + ".weight" * ("bias" not in name): p for name, p in named.items()}
    assert named.keys() == {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in named.items():
            ours.get_parameter(name).copy_(parameter.add_(0.3 * torch.randn_like(parameter)))
            if "magnitude" in name:  # ours is its difference from the frozen norms
                ours.get_parameter(name).sub_(ours.get_submodule(name.split(".")[0]).weight.norm(dim=1))
    if drops:  # the same ones
        for module in ours.modules():
            if isinstance(module, LoRALinear):
                module.lora_dropout = Drops()
        for name, module in theirs.named_modules():
            if name.endswith("lora_dropout"):
                module["default"] = Drops()
    x = torch.randn(5, 6, dtype=torch.float64)
    outputs = ours(x), theirs(x)
    for output in outputs:
        output.square().sum().backward()
    assert torch.allclose(*outputs, rtol=1e-12)
    for name, parameter in named.items():
        assert torch.allclose(ours.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-12), name


class Drops(nn.Module):
    """Dropout that always drops the same elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.numel()).view(x.shape) % 3 > 0) * 1.5


def test_a_module_to_save_must_exist():
    with pytest.raises(ModelError, match="modules_to_save=head_: no module with weights has that name; e.g. c_attn"):
        adapt(GPT2(), 4, 8, 0.0, None, modules_to_save=["ln_f", "head_"])


def test_a_new_dora_with_dropout_changes_no_bit_in_bfloat16():
    chain = chain_of(nn.Sequential(nn.Linear(64, 64, bias=False)), SquaredError())
    ours, base = (one.build(["0"], 7, CPU) for one in (adapt(chain, 2, 4, 0.5, None, dora=True), chain))
    x = torch.randn(50, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), base(x))
