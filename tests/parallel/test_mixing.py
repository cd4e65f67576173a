"""A layer or a loss that needs other positions of a sequence than those that a process has is named before a run."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import architectures
from common.errors import ModelError, PlanError
from data.dataset import Batch
from models import sequence
from models.attention import attend
from models.batchnorm import BatchNorm1d
from models.causal_lm import causal_lm
from models.chain import Chain, LayerSpec
from models.gpt2 import gpt2
from models.llama import llama
from models.losses import IGNORED, SquaredError, Sums, TokenCrossEntropy, as_sums, gather
from models.moe import moe
from models.resnet50 import resnet50
from models.sequential import chain_of
from models.transformer import transformer
from parallel.axes.context import ContextParallel
from parallel.examination import examine
from parallel.layout import Layout
from parallel.mixing import _Trial, check_positions

WORDS, LENGTH, WIDTH = 50, 64, 8
TOKENS = torch.randint(WORDS, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1))
TWO = Layout("context", cp=2)
EMBEDDING = LayerSpec("embedding", lambda: nn.Embedding(WORDS, WIDTH))
HEAD = LayerSpec("head", lambda: nn.Linear(WIDTH, WORDS))


class Does(nn.Module):
    """Calls a function, with a parameter [WIDTH, WIDTH]."""

    def __init__(self, function):
        super().__init__()
        self.function, self.w = function, nn.Parameter(torch.eye(WIDTH))

    def forward(self, *x):
        return self.function(*x, self.w)


class Heads(nn.Module):
    """Projects to two heads of queries, keys and values, and calls ``function`` with them."""

    def __init__(self, function, kv_heads=2):
        super().__init__()
        self.function, self.sizes = function, (WIDTH, *[kv_heads * WIDTH // 2] * 2)
        self.project = nn.Linear(WIDTH, sum(self.sizes))

    def forward(self, x):
        parts = self.project(x).split(self.sizes, dim=-1)
        y = self.function(*(part.unflatten(-1, (-1, WIDTH // 2)).transpose(1, 2) for part in parts))
        return x + y.transpose(1, 2).flatten(2)


class OverTime(nn.Sequential):
    """Calls modules for [b, c, t]."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Table(nn.Module):
    """Adds rows of a table of positions."""

    def __init__(self, rows=LENGTH, positions=None):
        super().__init__()
        self.table, self.positions = nn.Parameter(torch.zeros(rows, WIDTH)), positions

    def forward(self, x):
        return x + (self.table if self.positions is None else self.table[self.positions(x.shape[1], x.device)])


class Between(nn.Module):
    """A learned matrix [t, t]."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(LENGTH, LENGTH))

    def forward(self, x):
        t = x.shape[1]
        return x + self.w[:t, :t].tril() @ x


class Recurrent(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0]


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Normalized(BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Alternates(nn.Module):
    """Adds the mean of each pair of neighbors; takes even lengths only."""

    def forward(self, x):
        return x + x.unflatten(1, (-1, 2)).mean(2, keepdim=True).expand(-1, -1, 2, -1).flatten(1, 2)


class Recomputed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class InEights(nn.Module):
    """Computes eight positions at a time, each on its own."""

    def forward(self, x):
        return x.unflatten(1, (-1, 8)).square().flatten(1, 2)


def own_positions(length, device):
    return torch.arange(length, device=device)


def rotated(x, positions):
    angles = positions(x.shape[-2], x.device)[:, None] * torch.tensor([1.0, 0.1], device=x.device)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def turned(positions, q, k, v):
    return attend(rotated(q, positions), rotated(k, positions), v)


def linear_attention(q, k, v):
    q, k = q.softmax(-1), k.exp()
    return torch.einsum("bhtd,bhtde->bhte", q, torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2))


def _places(x):
    return sequence.positions(x.shape[1], x.device)


def state_space(x, w):
    state, states = torch.zeros_like(x[:, 0]), []
    for each in x.unbind(1):
        states.append(state := 0.9 * state + each @ w)
    return torch.stack(states, 1)


def alibi(q, k, v):
    at = torch.arange(q.shape[2], device=q.device)
    bias = -(at[:, None] - at).abs().to(q.dtype).masked_fill(at[:, None] < at, float("inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def top(x, w):
    """Only the eighth of the positions with the highest scores is changed."""
    best = x.sum(-1).topk(max(1, x.shape[1] // 8), dim=1).indices[..., None].expand(-1, -1, x.shape[2])
    return x.scatter_add(1, best, x.gather(1, best))


def by_capacity(x, w):
    """Each of four experts takes an eighth of the positions at most."""
    rows = x.flatten(0, 1)
    chosen = F.one_hot((rows @ w)[:, :4].argmax(-1), 4)
    taken = chosen * (chosen.cumsum(0) <= len(rows) // 8)
    return (rows * taken.sum(-1, keepdim=True)).view_as(x)


def shifted(by, x, w):
    return torch.cat((x[:, :1].expand(-1, min(by, x.shape[1]), -1), x[:, :-by]), 1) + x


MIXES = {
    "convolution": lambda: OverTime(nn.Conv1d(WIDTH, WIDTH, 3, padding=2)),
    "dilation of nine": lambda: OverTime(nn.Conv1d(WIDTH, WIDTH, 2, padding=9, dilation=9)),
    "dilation of 31": lambda: OverTime(nn.Conv1d(WIDTH, WIDTH, 2, padding=31, dilation=31, groups=WIDTH)),
    "convolution over t and c": lambda: Does(lambda x, w: F.conv2d(x[:, None], w[None, None, :3, :3], padding=1)[:, 0]),
    "state space": lambda: Does(state_space),
    "GRU": lambda: Recurrent(WIDTH, WIDTH, batch_first=True),
    "sum so far": lambda: Does(lambda x, w: x.cumsum(1)),
    "token shift": lambda: Does(partial(shifted, 1)),
    "shift by 33": lambda: Does(partial(shifted, 33)),
    "roll by 16": lambda: Does(lambda x, w: x + x.roll(16, 1)),
    "flip": lambda: Does(lambda x, w: x + x.flip(1)),
    "mean over t": lambda: Does(lambda x, w: x - x.mean(1, keepdim=True)),
    "maximum over t": lambda: Does(lambda x, w: x / x.abs().amax(1, keepdim=True)),
    "FFT": lambda: Does(lambda x, w: torch.fft.fft(x, dim=1).real),
    "softmax over t": lambda: Does(lambda x, w: x.softmax(1)),
    "norm of the sequence": lambda: Does(lambda x, w: F.layer_norm(x, x.shape[1:])),
    "norm of channels over t": lambda: OverTime(nn.InstanceNorm1d(WIDTH)),
    "groups over t": lambda: OverTime(nn.GroupNorm(2, WIDTH)),
    "batch norm": lambda: Normalized(WIDTH),
    "torch's batch norm": lambda: OverTime(nn.BatchNorm1d(WIDTH)),
    "learned [t, t]": Between,
    "first position": lambda: Does(lambda x, w: x + x[:, :1]),
    "last position": lambda: Does(lambda x, w: x + x[:, -1:]),
    "pairs": Alternates,
    "highest positions": lambda: Does(top),
    "experts with a capacity": lambda: Does(by_capacity),
    "a small share": lambda: Does(lambda x, w: x + 1e-3 * x.mean(1, keepdim=True)),
    "counts from the first": lambda: Does(lambda x, w: x + _places(x)[:, None] - _places(x)[0]),
    "sorted": lambda: Does(lambda x, w: x.sort(1).values),
    "attention of torch": lambda: Heads(partial(F.scaled_dot_product_attention, is_causal=True)),
    "attention by hand": lambda: Heads(lambda q, k, v: (q @ k.mT).softmax(-1) @ v),
    "linear attention": lambda: Heads(linear_attention),
    "ALiBi": lambda: Heads(alibi),
    "nn.MultiheadAttention": lambda: SelfAttention(WIDTH, 2, batch_first=True),
    "nn.TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "documents counted": lambda: Heads(lambda q, k, v: attend(q, k, v, documents=(q[:, 0, :, 0] > 0).cumsum(1))),
    "in numpy": lambda: Does(lambda x, w: torch.from_numpy(x.detach().numpy().cumsum(1))),
    "rotary positions of its own": lambda: Heads(partial(turned, own_positions)),
    "positions of its own": lambda: Table(positions=own_positions),
    "positions from the end": lambda: Table(positions=lambda t, device: torch.arange(t, device=device).flip(0)),
    "a bias [t, c]": Table,
    "a bias [:t]": lambda: Does(lambda x, w: x + torch.linspace(0, 1, x.shape[1], device=x.device)[:, None]),
    "the length": lambda: Does(lambda x, w: x * x.shape[1] ** 0.5),
    "heads and t exchanged": lambda: Heads(lambda q, k, v: attend(q.mT, k.mT, v.mT).mT),
}  # fmt: skip
FINE = {
    "MLP": lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)),
    "GLU": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU()),
    "gates": lambda: Does(lambda x, w: x * (x @ w).sigmoid()),
    "softmax over c": lambda: nn.Softmax(dim=-1),
    "a convolution of width one": lambda: OverTime(nn.Conv1d(WIDTH, WIDTH, 1)),
    "dropout": lambda: nn.Dropout(0.5),
    "attention": lambda: Heads(attend),
    "grouped attention": lambda: Heads(partial(attend, window=3, softcap=5.0, scale=0.3), kv_heads=1),
    "rotary positions": lambda: Heads(partial(turned, sequence.positions)),
    "a table of positions": lambda: Table(positions=sequence.positions),
    "rows": lambda: Does(lambda x, w: (x.flatten(0, 1) @ w).view_as(x)),
    "eight at a time": InEights,
    "experts": lambda: Does(lambda x, w: torch.where(x.argmax(-1, keepdim=True) > 3, x @ w, -x)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "recomputed": lambda: Recomputed(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)),
    "in place": lambda: Does(lambda x, w: x.mul_(2)),
    "constant": lambda: Does(lambda x, w: x.softmax(-1).sum(-1, keepdim=True) * w[0]),
    "rounded": lambda: Does(lambda x, w: x.round()),
}  # fmt: skip


def with_layer(build, loss=None):
    """Three layers, of which the second one is tried."""
    return Chain([EMBEDDING, LayerSpec("h.0", build), HEAD], loss or TokenCrossEntropy())


def check(chain, inputs=TOKENS[:, :-1], targets=TOKENS[:, 1:]):
    check_positions(chain, examine(chain, Batch(inputs, targets)), TWO)


@pytest.mark.parametrize("build", MIXES.values(), ids=MIXES)
def test_a_layer_that_needs_other_positions_is_refused_by_name(build):
    for tokens in (TOKENS, torch.ones_like(TOKENS)):
        with pytest.raises(PlanError, match=r"cp=2 .*layer 'h.0' \(\w+\) .*attention.attend.* set parallel.cp=1"):
            check(with_layer(build), tokens[:, 1:])


@pytest.mark.parametrize("build", FINE.values(), ids=FINE)
def test_a_layer_that_computes_each_position_on_its_own_passes(build):
    check(with_layer(build))


RETURNS = {
    "pooled": lambda x, w: x.mean(1),
    "the last position": lambda x, w: x[:, -1:],
    "classes before t": lambda x, w: x.mT,
    "time first": lambda x, w: x.transpose(0, 1),
    "rows": lambda x, w: x.flatten(0, 1),
    "a number too": lambda x, w: (x, x.mean()),
    "angles [t] too": lambda x, w: (x, torch.zeros(x.shape[1], device=x.device)),
    "a mask [b, 1, t, t] too": lambda x, w: (x, torch.ones(len(x), 1, x.shape[1], x.shape[1], device=x.device)),
    "one more position": lambda x, w: F.pad(x, (0, 0, 1, 0)),
}


@pytest.mark.parametrize("function", RETURNS.values(), ids=RETURNS)
def test_an_output_without_the_sequence_in_dimension_1_is_refused_by_name(function):
    with pytest.raises(PlanError, match=r"layer 'h.0' \(Does\) returns \[.*\] for one sample of 64 positions, not"):
        check(with_layer(lambda: Does(function)))


def test_each_tensor_of_a_tuple_is_tried():
    def pair(second):
        two = LayerSpec("two", lambda: Does(lambda x, w: (x @ w, second(x))))
        one = LayerSpec("one", lambda: Does(lambda x, y, w: x + y[..., None]))
        return Chain([EMBEDDING, two, one, HEAD], TokenCrossEntropy())

    check(pair(lambda x: x.argmax(-1)))
    with pytest.raises(PlanError, match=r"layer 'two' \(Does\) mixes positions"):
        check(pair(lambda x: (x.argmax(-1) == 0).cumsum(1)))


MANY = torch.randint(512, TOKENS.shape, generator=torch.Generator().manual_seed(2))
OF_TOKENS = {
    "documents": lambda x, token: (x == token).cumsum(1),
    "any": lambda x, token: (x == token).any(1, keepdim=True),
    "how many": lambda x, token: (x == token).sum(1, keepdim=True),
    "the first": lambda x, token: (x == token).int().argmax(1, keepdim=True) * (x == token),
    "before the first": lambda x, token: (x == token).cumsum(1) == 0,
    "after it": lambda x, token: F.pad(x[:, :-1] == token, (1, 0)),
    "the largest": lambda x, token: x == x.amax(1, keepdim=True),
    "the smallest": lambda x, token: x == x.amin(1, keepdim=True),
    "seen before": lambda x, token: (x[:, :, None] == x[:, None]).tril(-1).any(-1),
    "like the one before": lambda x, token: F.pad(x[:, 1:] == x[:, :-1], (1, 0)),
}


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS % 5 * 7, TOKENS % 2 * 21, MANY], ids=[50, 5, 2, 512])
@pytest.mark.parametrize("function", OF_TOKENS.values(), ids=OF_TOKENS)
def test_an_embedding_that_derives_something_from_other_tokens_is_refused(function, tokens):
    class Derives(nn.Embedding):
        def forward(self, x):
            return super().forward(x) + function(x, self.token)[..., None]

    values = tokens[:, :-1].unique()
    for token in values[[0, len(values) // 2, -1]].tolist():
        Derives.token = token
        layers = [LayerSpec("embedding", lambda: Derives(512, WIDTH)), HEAD]
        with pytest.raises(PlanError, match=r"layer 'embedding' \(Derives\) mixes positions"):
            check(Chain(layers, TokenCrossEntropy()), tokens[:, :-1], tokens[:, 1:] % WORDS)


def test_layers_that_differ_in_a_function_or_a_buffer_only_are_tried_each():
    def masks(value):
        layer = nn.Module()
        layer.__class__ = Masked
        layer.register_buffer("mask", torch.eye(LENGTH) * value)
        return layer

    class Masked(nn.Module):
        def forward(self, x):
            return x + self.mask[: x.shape[1], : x.shape[1]].roll(1, 0) @ x

    fine, mixing = lambda x, w: x @ w, lambda x, w: x.cumsum(1)
    for builds in ([partial(Does, fine), partial(Does, mixing)], [partial(masks, 0.0), partial(masks, 1.0)]):
        layers = [EMBEDDING, *(LayerSpec(f"h.{i}", build) for i, build in enumerate(builds)), HEAD]
        with pytest.raises(PlanError, match="layer 'h.1'"):
            check(Chain(layers, TokenCrossEntropy()))


def test_layers_that_draw_by_themselves_are_refused_by_name():
    for function in (lambda x, w: F.dropout(x, 0.1), lambda x, w: x + torch.rand_like(x)):
        with pytest.raises(PlanError, match=r"layer 'h.0' \(Does\) draws random numbers by itself.*nn.Dropout"):
            check(with_layer(lambda function=function: Does(function)))


def test_a_layer_that_fails_is_refused_with_its_error():
    def fails(x, w):
        raise KeyError("no such part")

    with pytest.raises(PlanError, match=r"layer 'h.0' \(Does\) does not compute 64 of 64 .*KeyError: 'no such part'"):
        check(with_layer(lambda: Does(fails)))


def plain(output, targets, weights=None):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


class By:
    """A user's loss."""

    metrics = ("accuracy",)

    def __init__(self, function):
        self.function = function

    def __call__(self, output, targets, weights):
        return Sums(*self.function(output, targets), (torch.zeros(()),))


LOSSES = {
    "shifts the labels": lambda x, y: (plain(x[:, :-1], y[:, 1:]).sum(), (y[:, 1:] != IGNORED).sum()),
    "a mean per sequence": lambda x, y: (plain(x, y).mean(1).sum(), torch.tensor(float(len(y)))),
    "divides by t": lambda x, y: (plain(x, y).sum() / y.shape[1], torch.tensor(y.numel())),
    "weighs by places": lambda x, y: ((plain(x, y) * torch.arange(y.shape[1])).sum(), torch.tensor(y.numel())),
    "counts sequences": lambda x, y: (plain(x, y).sum(), torch.tensor(len(y))),
    "adds a term": lambda x, y: (plain(x, y).sum() + x.mean((0, 1)).square().sum(), torch.tensor(y.numel())),
    "the last position": lambda x, y: (plain(x[:, -1:], y[:, -1:]).sum(), torch.tensor(len(y))),
}
LOSSES_OF_EACH = {
    "by hand": lambda x, y: (plain(x, y).sum(), (y != IGNORED).sum()),
    "without ignored targets": lambda x, y: (-x.log_softmax(-1).gather(2, y[..., None]).sum(), torch.tensor(y.numel())),
    "by position": lambda x, y: (
        (plain(x, y) * sequence.positions(y.shape[1], y.device)).sum(),
        torch.tensor(y.numel()),
    ),
    "logits' size": lambda x, y: (plain(x, y).sum() + 1e-2 * x.logsumexp(-1).square().sum(), torch.tensor(y.numel())),
}


@pytest.mark.parametrize("function", LOSSES.values(), ids=LOSSES)
def test_a_loss_that_is_no_sum_over_positions_is_refused(function):
    with pytest.raises(PlanError, match="the loss By is no sum over positions: .* parallel.cp=1"):
        check(with_layer(nn.Identity, By(function)))


@pytest.mark.parametrize("function", LOSSES_OF_EACH.values(), ids=LOSSES_OF_EACH)
def test_a_loss_that_is_a_sum_over_positions_passes(function):
    check(with_layer(nn.Identity, By(function)))


def test_metrics_of_a_loss_are_sums_too():
    class Accurate(By):
        def __call__(self, output, targets, weights):
            right = (output.argmax(-1) == targets).double().mean(1).sum()
            return Sums(plain(output, targets).sum(), (targets != IGNORED).sum(), (right,))

    with pytest.raises(PlanError, match="the loss Accurate is no sum over positions"):
        check(with_layer(nn.Identity, Accurate(None)))


def test_the_loss_of_a_last_layer_is_tried_in_place_of_its_output():
    class Head(nn.Linear):
        def loss(self, x, targets, weights):
            x = self(x)
            return Sums(plain(x[:, :-1], targets[:, 1:]).sum(), (targets[:, 1:] != IGNORED).sum())

    layers = [EMBEDDING, LayerSpec("head", lambda: Head(WIDTH, WORDS))]
    with pytest.raises(PlanError, match=r"the loss of layer 'head' \(Head\) is no sum over positions"):
        check(Chain(layers, TokenCrossEntropy()))


MODELS = {
    "gpt2": lambda: gpt2("tiny", vocab_size=WORDS, dropout=0.1),
    "transformer": lambda: transformer(d_model=32, d_hid=48, vocab_size=WORDS),
    "llama": lambda: llama("tiny", vocab_size=WORDS),
    "qwen3": lambda: llama("tiny", vocab_size=WORDS, qk_norm=True, qkv_bias=True),
    "large": lambda: llama("135M", vocab_size=WORDS, n_layer=2),
    "moe": lambda: moe(n_layer=2, n_embd=32, head_dim=8, expert_width=16, vocab_size=WORDS, shared_experts=1),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_models_of_this_project_pass(build):
    check(build())


@pytest.mark.parametrize("shape", [(3, 20, 6), (3, 20, 6, 2)])
def test_sequences_of_numbers_pass(shape):
    chain = chain_of(nn.Sequential(nn.Linear(shape[-1], 4), nn.Tanh(), nn.Linear(4, 1)), as_sums(nn.MSELoss()))
    check(chain, torch.rand(shape), torch.rand(*shape[:-1], 1))


def test_data_without_sequences_is_left_to_the_check_of_the_data():
    check(Chain([LayerSpec("all", lambda: nn.Linear(6, 1))], SquaredError()), torch.rand(4, 6), torch.rand(4))
    check(resnet50(num_classes=4), torch.rand(2, 3, 32, 32), torch.tensor([1, 2]))


def test_nothing_is_left_behind():
    chain = with_layer(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)))
    loss, generator = chain.loss, torch.get_rng_state()
    found = examine(chain, Batch(TOKENS[:, :-1], TOKENS[:, 1:]))
    before = [parameter.clone() for parameter in chain.build(chain.names, 0, torch.device("cpu")).parameters()]
    check_positions(chain, found, TWO)
    assert torch.equal(generator, torch.get_rng_state()) and torch.is_grad_enabled() and sequence.part() is None
    after = chain.build(chain.names, 0, torch.device("cpu")).parameters()
    assert all(map(torch.equal, before, after)) and chain.loss is loss


def test_a_result_is_kept_for_other_layouts(monkeypatch):
    found = examine(chain := with_layer(MIXES["flip"]), Batch(TOKENS[:, :-1], TOKENS[:, 1:]))
    for cp in (2, 4):
        with pytest.raises(PlanError, match=f"parallel.cp={cp} .*layer 'h.0'"):
            check_positions(chain, found, Layout("context", cp=cp))
        monkeypatch.setattr("parallel.mixing._Trial", None)


def test_heads_that_ulysses_cannot_divide_are_refused_with_what_can_be_set():
    chain = llama("tiny", vocab_size=WORDS, n_head=8, kv_heads=4, n_embd=64)
    found = examine(chain, Batch(TOKENS[:, :-1], TOKENS[:, 1:]))
    for fits in (Layout("context", cp=4, context="ulysses"), Layout("context", cp=8, context="ring")):
        check_positions(chain, found, fits)
    check_positions(chain, found, Layout("context", cp=2, tp=2, context="ulysses"))
    refused = "layer 'layers.0' .* has 8 heads of queries and 4 of keys and values; set"
    with pytest.raises(PlanError, match=rf"8 ranks.*{refused} parallel.cp=2 or parallel.cp=4 for ulysses"):
        check_positions(chain, found, Layout("context", cp=8, context="ulysses"))
    with pytest.raises(PlanError, match=rf"parallel.tp=2\), and {refused} parallel.cp=2 for ulysses, or"):
        check_positions(chain, found, Layout("context", cp=4, tp=2, context="ulysses"))


def test_a_loss_that_gathers_samples_is_refused():
    with pytest.raises(PlanError, match="the loss By calls models.losses.gather"):
        check(with_layer(nn.Identity, By(lambda x, y: (plain(gather(x), gather(y)).sum(), torch.tensor(1)))))


OF_TRANSFORMERS = {
    "llama": "",
    "mixtral": "",
    "gpt_oss": "layer 'layers.0' .GptOssDecoderLayer.: GptOssAttention has attention with sinks",
    "mpt": "layer 'layers.0' .MptBlock. does not compute 32 of 64 positions",
}


@pytest.mark.parametrize("kind, refused", OF_TRANSFORMERS.items())
def test_models_of_transformers_pass_if_their_attention_goes_through_attend(tmp_path, monkeypatch, kind, refused):
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    monkeypatch.setitem(architectures.KINDS, "mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 64})
    architectures.write_config(tmp_path, kind, architectures.TINY)
    with pytest.raises(PlanError, match=refused) if refused else nullcontext():
        check(causal_lm(str(tmp_path)))


def test_dropout_of_their_attention_is_refused_with_the_setting(tmp_path):
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    architectures.write_config(tmp_path, "llama", architectures.TINY)
    with pytest.raises(PlanError, match=r"\+model.settings.attention_dropout=0 turns it off.*\. Set parallel.cp=1"):
        check(causal_lm(str(tmp_path), settings={"attention_dropout": 0.1}))


def test_they_are_first_compared_with_themselves_for_positions_in_another_order(tmp_path):
    pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")
    architectures.write_config(tmp_path, "falcon", architectures.TINY)
    chain = causal_lm(str(tmp_path))
    found = examine(chain, Batch(TOKENS[:, :-1], TOKENS[:, 1:]))
    ContextParallel.check_facts(Layout("context", cp=1), chain, found)
    with pytest.raises(ModelError, match="values for positions in another order .* it attends by itself"):
        ContextParallel.check_facts(TWO, chain, found)


class Numbered(nn.Linear):
    """A large layer that knows its number, as those of transformers do."""

    def __init__(self, number, shift=0):
        super().__init__(1200, 1200)
        self.layer_idx, self.shift = number, shift

    def forward(self, x):
        return super().forward(x).roll(self.shift, 1)


def test_of_large_layers_that_differ_in_their_number_only_one_is_tried(monkeypatch):
    tried, check_layer = [], _Trial._check_layer

    def noted(self, name, module, given):
        tried.append(name)
        return check_layer(self, name, module, given)

    monkeypatch.setattr(_Trial, "_check_layer", noted)
    layers = [LayerSpec("embedding", lambda: nn.Embedding(WORDS, 1200))]
    layers += [LayerSpec(f"h.{i}", partial(Numbered, i)) for i in range(4)]
    layers += [LayerSpec("h.4", partial(Numbered, 4, shift=1))]
    with pytest.raises(PlanError, match="layer 'h.4'"):
        check(Chain(layers, TokenCrossEntropy()))
    assert tried == ["layer 'embedding' (Embedding)", "layer 'h.0' (Numbered)", "layer 'h.4' (Numbered)"]
