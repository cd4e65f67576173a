"""Ranks that share sequences train as plain torch does on whole ones: packed documents, few targets, and the scale."""

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import Layout, Recipe, Result, assert_same_training, train
from torch import Tensor, nn

from data.dataset import Batch
from models.attention import attend
from models.chain import Chain, LayerSpec
from models.cut import Columns, Rows
from models.losses import IGNORED, TokenCrossEntropy
from models.sequence import positions
from parallel.axes.context_attention import WAYS

WIDTH, HEADS, WORDS, SAMPLES, LENGTH = 8, 4, 11, 4, 16
RECIPE = Recipe("packed", SAMPLES, lr=0.5, steps=3, clip=0.3, precision="fp64", eval_every=1)
# Documents of each sample: they end on borders of chunks, beside them, and one is shorter than any chunk.
PACKED = torch.tensor([[4, 4, 8], [3, 6, 7], [16, 0, 0], [7, 1, 8]])
# Of sample 0 two targets are left, both in the last chunk; of sample 1 those beside borders of chunks.
LEFT = {0: [13, 14], 1: [3, 4, 7, 9, 11, 12]}


class Embedding(nn.Module):
    """(tokens, documents) [b, t] -> (x [b, t, c], documents)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(tokens) + self.places(positions(tokens.shape[1], tokens.device)), documents


class Block(nn.Module):
    """Attention inside of documents; (x, documents) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.o(merged(attend(*self.qkv(x), documents=documents))), documents

    def qkv(self, x: Tensor) -> list[Tensor]:
        return [m(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for m in (self.q, self.k, self.v)]


class Head(nn.Linear):
    """(x, documents) -> logits [b, t, words]."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return super().forward(x)


def merged(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def chain() -> Chain:
    layers = [LayerSpec("embedding", Embedding), LayerSpec("one", Block), LayerSpec("two", Block)]
    table = {"*.[qkv]": Columns(unit=WIDTH // HEADS), "*.o": Rows()}
    return Chain([*layers, LayerSpec("head", Head)], TokenCrossEntropy(), cut=table)


def batch_at(step: int) -> Batch:
    tokens = torch.randint(WORDS, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    documents = torch.stack([torch.arange(3).repeat_interleave(lengths) for lengths in PACKED])
    targets = tokens[:, 1:].masked_fill(documents != F.pad(documents, (0, 1), value=-1)[:, 1:], IGNORED)
    for sample, left in LEFT.items():
        targets[sample, [i for i in range(LENGTH) if i not in left]] = IGNORED
    return Batch((tokens[:, :-1], documents), targets)


def train_packed(layout: Layout, recipe: Recipe) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "chain_and_batches", lambda recipe: (chain(), batch_at))
        return train(layout, recipe)


def plainly(layers: nn.Module, batch: Batch, samples: int) -> tuple[Tensor, int, list[Tensor]]:
    """The sum of the losses of targets of the first samples, their number, and the logits and targets."""
    tokens, documents = batch.inputs
    places = torch.arange(LENGTH)
    x = layers["embedding"].words(tokens) + layers["embedding"].places(places)
    seen = (places[:, None] >= places) & (documents[:, None, :, None] == documents[:, None, None, :])
    for name in ("one", "two"):
        x = x + layers[name].o(merged(F.scaled_dot_product_attention(*layers[name].qkv(x), attn_mask=seen)))
    logits, targets = layers["head"](x, documents)[:samples], batch.targets[:samples]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, int((targets != IGNORED).sum()), [logits.detach(), targets]


@pytest.fixture(scope="module")
def in_plain_torch() -> Result:
    layers = chain().build(chain().names, 7, torch.device("cpu"), torch.float64)
    found = Result(initial={name: p.detach().clone() for name, p in layers.named_parameters()})
    sgd = torch.optim.SGD(layers.parameters(), lr=RECIPE.lr, momentum=RECIPE.momentum)
    for step in range(1, RECIPE.steps + 1):
        loss, count, _ = plainly(layers, batch_at(step), SAMPLES)
        sgd.zero_grad()
        (loss / count).backward()
        found.losses.append(loss.item() / count)
        found.norms.append(nn.utils.clip_grad_norm_(layers.parameters(), RECIPE.clip).item())
        sgd.step()
        loss, count, outputs = plainly(layers, batch_at(0), SAMPLES - 1)  # an evaluation's last sample is padding
        found.evaluations.append([loss.item(), count])
        found.outputs += outputs
    found.state = {name: p.detach().clone() for name, p in layers.named_parameters()}
    return found


LAYOUTS = [
    Layout("single", chunks=2),
    *(Layout("context", cp=2, context=way, chunks=2) for way in WAYS),
    *(Layout("context", cp=4, context=way) for way in WAYS),
    *(Layout("tensor", tp=2, cp=2, context=way) for way in WAYS),
    Layout("ddp", dp=2, cp=2, context="ulysses", chunks=2),
    Layout("fsdp", dp=2, cp=2, context="ring"),
    Layout("pipelined", pp=2, cp=2, context="gather", chunks=2, schedule="1f1b"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_documents_are_trained_as_by_plain_torch_on_whole_sequences(ranks, in_plain_torch, layout):
    assert in_plain_torch.evaluations[0][1] == 2 + 6 + 15
    run = ranks.run(layout.processes, train_packed, layout, RECIPE)
    assert_same_training(run, in_plain_torch, 1e-12)
