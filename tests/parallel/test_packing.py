"""Documents that share rows are trained as by plain torch in rows of their own, in every layout."""

import tempfile
from dataclasses import replace
from pathlib import Path

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import Layout, Recipe, Result, assert_same_training, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import architectures
from common.errors import ModelError, PlanError
from data.dataset import Batch
from models.causal_lm import causal_lm
from models.chain import Chain, Layers, LayerSpec
from models.gpt2 import gpt2
from models.llama import llama
from models.losses import IGNORED, TokenCrossEntropy
from models.moe import moe
from parallel.examination import examine
from parallel.mixing import check_documents

WORDS, SAMPLES, LENGTH = 31, 4, 32
RECIPE = Recipe("packed", SAMPLES, lr=0.5, steps=3, clip=0.3, precision="fp64", eval_every=1)
# The documents of each row. They end on borders of chunks, beside them, and some are shorter than any chunk.
ROWS = [[8, 8, 16], [3, 6, 7, 1, 15], [32], [7, 1, 8, 9]]  # the last row is not full


class Recomputed(nn.Sequential):
    """A layer that recomputes itself in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def with_recomputed(chain: Chain) -> Chain:
    layers = [LayerSpec(one.name, one.build) for one in chain.layers]
    layers[1] = LayerSpec(layers[1].name, lambda build=layers[1].build: Recomputed(build()))
    return Chain(layers, TokenCrossEntropy())


SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": WORDS}


def of_transformers(kind: str, **options) -> Chain:
    folder = Path(tempfile.mkdtemp())
    architectures.write_config(folder, kind, {**architectures.TINY, "vocab_size": WORDS, **options})
    return causal_lm(str(folder))


CHAINS = {
    "transformers' gpt2": lambda: of_transformers("gpt2", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "gemma2": lambda: of_transformers("gemma2", sliding_window=4),
    "llama": lambda: llama("tiny", kv_heads=2, head_dim=4, mlp_width=24, block_size=LENGTH, **SIZES),
    "gpt2": lambda: gpt2("tiny", block_size=LENGTH, **SIZES),
    "moe": lambda: moe(kv_heads=2, head_dim=4, experts=4, expert_width=8, balance=0, z_loss=0, **SIZES),
    "recomputed": lambda: with_recomputed(CHAINS["llama"]()),
}


def documents_at(step: int) -> list[list[Tensor]]:
    """The tokens of the documents of each row, one more than its positions."""
    generator = torch.Generator().manual_seed(step)
    return [[torch.randint(WORDS, (n + 1,), generator=generator) for n in lengths] for lengths in ROWS]


def batch_at(step: int) -> Batch:
    inputs, begins = torch.zeros(2, SAMPLES, LENGTH, dtype=torch.int64)
    targets = torch.full((SAMPLES, LENGTH), IGNORED)
    for row, documents in enumerate(documents_at(step)):
        at = 0
        for tokens in documents:
            end = at + len(tokens) - 1
            inputs[row, at:end], targets[row, at:end], begins[row, at:end] = tokens[:-1], tokens[1:], at
            at = end
        begins[row, at:] = at
    return Batch(inputs, targets, begins)


def train_packed(layout: Layout, recipe: Recipe) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "chain_and_batches", lambda recipe: (CHAINS[recipe.model](), batch_at))
        return train(layout, recipe)


def apart(layers: Layers, documents: list[list[Tensor]]) -> tuple[Tensor, int]:
    """The sum of the losses of documents, each alone, and the number of their targets."""
    losses = []
    for tokens in (tokens for row in documents for tokens in row):
        x = tokens[None, :-1]
        for _, layer in layers.items():
            x = layer(x)
        losses.append(F.cross_entropy(x[0], tokens[1:], reduction="none"))
    return torch.cat(losses).sum(), len(torch.cat(losses))


@pytest.fixture(scope="module")
def in_rows_of_their_own():
    known = {}

    def trained(model: str) -> Result:
        if model in known:
            return known[model]
        chain = CHAINS[model]()
        layers = chain.build(chain.names, 7, torch.device("cpu"), torch.float64)
        found = known[model] = Result(initial={n: p.detach().clone() for n, p in layers.named_parameters()})
        sgd = torch.optim.SGD(layers.parameters(), lr=RECIPE.lr, momentum=RECIPE.momentum)
        for step in range(1, RECIPE.steps + 1):
            loss, count = apart(layers, documents_at(step))
            sgd.zero_grad()
            (loss / count).backward()
            found.losses.append(loss.item() / count)
            found.norms.append(nn.utils.clip_grad_norm_(layers.parameters(), RECIPE.clip).item())
            sgd.step()
            with torch.no_grad():
                loss, count = apart(layers, documents_at(0)[:-1])  # the last row of an evaluation is padding
            found.evaluations.append([loss.item(), count])
        found.state = {name: p.detach().clone() for name, p in layers.named_parameters()}
        return found

    return trained


LAYOUTS = [
    ("llama", Layout("single", chunks=2)),
    ("recomputed", Layout("single", chunks=2)),
    ("gpt2", Layout("pipelined", pp=2, chunks=4, schedule="1f1b")),
    ("llama", Layout("context", cp=2, context="ring", chunks=2)),
    ("llama", Layout("tensor", tp=2, sequence=True)),
]
MORE = [
    ("gpt2", Layout("single")),
    ("moe", Layout("single", chunks=4)),
    ("llama", Layout("ddp", dp=2)),
    ("llama", Layout("context", cp=2, context="gather", chunks=2)),
    ("llama", Layout("context", cp=2, context="ulysses", chunks=2)),
    ("gpt2", Layout("context", cp=2, context="ring")),
    ("recomputed", Layout("pipelined", pp=2, chunks=4, schedule="1f1b")),
    ("gpt2", Layout("tensor", tp=2)),
    ("gpt2", Layout("fsdp", dp=2, chunks=2)),
    ("llama", Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="1f1b")),
    ("llama", Layout("pipe_fsdp", dp=2, pp=2, chunks=2, schedule="1f1b")),
    ("llama", Layout("tensor", tp=2, cp=2, context="gather", sequence=True)),
    ("gpt2", Layout("pipelined", pp=2, cp=2, context="ulysses", chunks=2, schedule="1f1b")),
    ("moe", Layout("expert", dp=2, ep=2)),
    ("llama", Layout("model_parallel", pp=2)),
    ("transformers' gpt2", Layout("single", chunks=2)),
    ("transformers' gpt2", Layout("pipelined", pp=2, chunks=2, schedule="1f1b")),
    ("transformers' gpt2", Layout("context", cp=2, context="ulysses")),
    ("gemma2", Layout("context", cp=2, context="gather", chunks=2)),
    ("gemma2", Layout("tensor", tp=2, cp=2, context="ring")),
    ("gemma2", Layout("pipe_ddp", dp=2, pp=2, chunks=2, schedule="1f1b")),
]


@pytest.mark.parametrize(
    "model, layout", [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)], ids=str
)
def test_documents_that_share_rows_are_trained_as_each_alone(ranks, in_rows_of_their_own, model, layout):
    run = ranks.run(layout.processes, train_packed, layout, replace(RECIPE, model=model))
    run[0].outputs.clear()  # in other rows than those of the documents alone
    # transformers' Gemma rounds to float32 inside.
    assert_same_training(run, in_rows_of_their_own(model), 1e-5 if model == "gemma2" else 1e-12)


class Counts(nn.Embedding):
    """Counts positions itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.arange(x.shape[1]))


class Sees(nn.MultiheadAttention):
    """Attends without ``models.attention.attend``."""

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return super().forward(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


class Moves(nn.Module):
    """Shows each token the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


OTHERS = {
    "Counts": lambda: Counts(512, 16),
    "Sees": lambda: Sees(16, 4, batch_first=True),
    "Moves": Moves,
    "LSTM": lambda: nn.Sequential(nn.LSTM(16, 16, batch_first=True), First()),
}


class First(nn.Module):
    def forward(self, x: tuple) -> Tensor:
        return x[0]


def with_layer(build) -> Chain:
    layers = [LayerSpec(one.name, one.build) for one in CHAINS["gpt2"]().layers]
    return Chain([*layers[:2], LayerSpec("own", build), *layers[2:]], TokenCrossEntropy())


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_sees_other_documents_is_an_error_before_the_run(name):
    chain = with_layer(OTHERS[name])
    with pytest.raises(PlanError, match="layer .own. .* mixes positions, or counts them"):
        check_documents(chain, examine(chain, batch_at(0)), Layout("single"))


def test_layers_that_attend_and_count_by_documents_are_allowed():
    for name, made in CHAINS.items():
        chain = made() if name != "gpt2" else gpt2("tiny", block_size=LENGTH, dropout=0.2, **SIZES)
        check_documents(chain, examine(chain, batch_at(0)), Layout("single"))
    batch = batch_at(0)
    short = Batch(*(x[:, :1] for x in (batch.inputs, batch.targets, batch.documents)))
    check_documents(CHAINS["llama"](), examine(CHAINS["llama"](), short), Layout("single"))  # of one token each
    with pytest.raises(PlanError, match="parallel=data_parallel computes copies of the model in threads"):
        check_documents(chain, examine(chain, batch_at(0)), Layout("data_parallel", devices=("cuda:0",)))


def test_a_model_of_transformers_that_attends_by_itself_is_named(monkeypatch):
    monkeypatch.setitem(architectures.KINDS, "mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 64})
    chain = of_transformers("mpt")
    with pytest.raises(ModelError, match="MptForCausalLM cannot be cut into rows of documents: layers.0 returns"):
        check_documents(chain, examine(chain, batch_at(0)), Layout("single"))
