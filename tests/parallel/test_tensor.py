"""Tensor parallelism beside the cells of parity: layers of other shapes, the vocabulary, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import cases
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import Layout, assert_same_training, chain_and_batches, planned, train
from cells import RECIPES
from probes import losses_of_optimizers
from small_models import perceptrons
from torch import nn

from common.errors import ModelError, PlanError
from data.tensors import TensorData
from models import fused_cross_entropy, sequence
from models.chain import Chain, LayerSpec
from models.cut import Columns, Rows, Vocabulary, check_table
from models.gpt2 import gpt2
from models.llama import llama
from models.losses import IGNORED, SquaredError
from models.resnet50 import resnet50
from models.seeds import Samples, by_sample, computing
from models.sequential import chain_of
from models.transformer import transformer
from parallel.axes import tensor
from parallel.axes.tensor import TensorParallel
from parallel.mesh import Ranks
from parallel.partition import even_split
from parallel.placement import Split

TWO, SEQUENCE = Layout("tensor", tp=2), Layout("tensor", tp=2, sequence=True)
WHOLE_HEAD = gpt2("tiny")  # as of transformers, where it has settings that no cut vocabulary has
WHOLE_HEAD = replace(WHOLE_HEAD, cut={k: cut for k, cut in WHOLE_HEAD.cut.items() if not isinstance(cut, Vocabulary)})
STAGES = Layout("pipelined", tp=2, pp=2, chunks=2, sequence=True)
EXACT = {"steps": 2, "eval_every": 2, "precision": "fp64"}


# -- layers ----------------------------------------------------------------------------------------------------------


def train_layers(chain, layout):
    """Train these layers with the batches of ``perceptrons``."""
    recipe = replace(RECIPES["perceptrons"], **EXACT)
    batch_at = chain_and_batches(recipe)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "chain_and_batches", lambda recipe: (chain(), batch_at))
        return train(layout, recipe)


def tied():
    """The first layer, which gets whole sequences, and the second one have the same scales."""
    return replace(perceptrons(), tied={"1.3.weight": "0.3.weight"})


def test_a_parameter_of_layers_with_the_whole_and_with_parts_of_the_sequence_is_refused(ranks):
    reference, *_ = ranks.run(1, train_layers, tied, Layout("single"))
    assert_same_training(ranks.run(2, train_layers, tied, TWO), reference, 1e-10)
    with pytest.raises(AssertionError, match="1.3.weight and 0.3.weight are one parameter"):
        ranks.run(2, train_layers, tied, SEQUENCE)


class Both(nn.Module):
    """Two pairs of columns and rows side by side, [b, t, 8] -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.a(x), self.b(x)
        return self.c(first) + self.d(self.dropout(second))


def two_regions_at_once():
    table = {"*.a": Columns(), "*.b": Columns(), "*.c": Rows(), "*.d": Rows()}
    return Chain([LayerSpec(name, Both) for name in "xy"], SquaredError(), cut=table)


def test_rows_whose_region_has_ended_are_refused(ranks):
    with pytest.raises(AssertionError, match=r"the region of x\.d, which has Rows\(\), has ended"):
        ranks.run(2, train_layers, two_regions_at_once, TWO)


class Branches(nn.Module):
    """Two branches of one region, [b, t, 8] -> same. The second has its norm when the first is inside already."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm, self.norm_of_part = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(4)
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.norm_of_part(self.a(self.norm(x)).unflatten(-1, (-1, 4))).flatten(-2)
        second = self.b(self.dropout(self.other_norm(x)))
        return x + self.c(first * second)


def branches():
    table = {"*.a": Columns(unit=4), "*.b": Columns(), "*.c": Rows()}
    return Chain([LayerSpec(name, Branches) for name in "xy"], SquaredError(), cut=table)


@pytest.mark.parametrize("layout", [TWO, SEQUENCE], ids=str)
def test_what_is_called_inside_a_region_and_computes_with_a_whole_tensor_is_whole(ranks, layout):
    reference, *_ = ranks.run(1, train_layers, branches, Layout("single"))
    assert_same_training(ranks.run(2, train_layers, branches, layout), reference, 1e-10)


def losses_of_adafactor(layout):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(8, 2), nn.GELU(), nn.Linear(2, 8)) for _ in range(2)]
    chain = replace(chain_of(nn.Sequential(*parts), SquaredError()), cut={"*.0": Columns(), "*.2": Rows()})
    recipe = replace(RECIPES["perceptrons"], precision="fp64", steps=4)
    batch_at = chain_and_batches(recipe)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "chain_and_batches", lambda recipe: (chain, batch_at))
        return losses_of_optimizers(recipe, layout, {"adafactor": {"_target_": "torch.optim.Adafactor", "lr": 0.1}})


def test_a_state_that_has_the_shape_of_a_rank_s_part_of_the_weight_stays_whole(ranks):
    """Of two columns each rank has one, and Adafactor keeps a mean over them, of one column."""
    (wanted,) = ranks.run(1, losses_of_adafactor, Layout("single"))
    for losses in ranks.run(2, losses_of_adafactor, TWO):
        assert losses["adafactor"] == pytest.approx(wanted["adafactor"], rel=1e-10)


def train_with_an_overflow_on_one_rank(layout, recipe):
    """The last rank along ``tensor`` has a gradient that is not finite."""
    with pytest.MonkeyPatch.context() as patch:
        real = cases._overflow
        patch.setattr(cases, "_overflow", lambda strategy: real(strategy) if strategy.axes[-1].ranks.index else None)
        return train(layout, recipe)


@pytest.mark.parametrize("layout", [SEQUENCE, STAGES], ids=str)
def test_an_overflow_on_one_rank_is_a_step_that_all_skip(ranks, layout):
    recipe = replace(RECIPES["gpt2"], precision="fp16", loss_scale=1024.0, overflow_at_step=2, eval_every=None)
    for result in ranks.run(layout.processes, train_with_an_overflow_on_one_rank, layout, recipe):
        assert result.finite == [True, False, True] and result.loss_scales == [1024, 512, 512]


# -- the vocabulary --------------------------------------------------------------------------------------------------


def cutting(mesh, sequence: bool = False) -> TensorParallel:
    """The axis as one of its ranks sees it."""
    return TensorParallel(tensor.TENSOR, SimpleNamespace(sequence=sequence), gpt2("tiny"), mesh)


def loss_of_shared_words(vocabulary: int) -> tuple[torch.Tensor, ...]:
    """On each rank: the loss of its words, and the gradients of the hidden states and of its weight."""
    mesh = SimpleNamespace(axis=lambda name: Ranks([*range(dist.get_world_size())], dist.get_rank(), dist.group.WORLD))
    layers = cutting(mesh)
    x, weight, bias, targets = words_of(vocabulary)
    split = Split(tensor.TENSOR, 0, tuple(even_split(vocabulary, layers.ranks.size)))
    own = [split.part(t, layers.ranks.index).requires_grad_() for t in (weight, bias)]
    words = tensor.VocabularyShard(layers, split, sequence_parallel=False)
    hidden = words.enter(x.requires_grad_())
    (loss,) = fused_cross_entropy.fused_cross_entropy(hidden, own[0], own[0].detach(), targets, own[1], words)
    (loss * 3).backward()
    logits = words.gather(F.linear(x.detach()[None], *own).detach())
    return loss.detach(), x.grad, own[0].grad, own[1].grad, logits


def words_of(vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    x, weight, bias = (
        torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((40, 6), (vocabulary, 6), (vocabulary,))
    )
    targets = torch.randint(vocabulary, (40,), generator=generator)
    targets[::7] = IGNORED
    return [x, weight, bias, targets]


@pytest.mark.parametrize("ranks_of_a_layer, vocabulary", [(2, 16), (2, 13), (4, 13), (4, 5)])
def test_the_loss_of_words_that_ranks_share_is_that_of_all_words(ranks, ranks_of_a_layer, vocabulary):
    x, weight, bias, targets = words_of(vocabulary)
    for t in (x, weight, bias):
        t.requires_grad_()
    logits = F.linear(x, weight, bias)
    loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    (loss * 3).backward()
    shares = ranks.run(ranks_of_a_layer, loss_of_shared_words, vocabulary)
    for its_loss, its_x, *_, its_logits in shares:
        torch.testing.assert_close(its_loss, loss.detach())
        torch.testing.assert_close(its_x, x.grad)
        torch.testing.assert_close(its_logits[0], logits.detach())
    torch.testing.assert_close(torch.cat([share[2] for share in shares]), weight.grad)
    torch.testing.assert_close(torch.cat([share[3] for share in shares]), bias.grad)


# -- what is refused -------------------------------------------------------------------------------------------------


def plan(chain, **keys):
    return planned(Layout("tensor", tp=2), chain, 8, **keys)


@pytest.mark.parametrize(
    "chain, keys, words",
    [
        (gpt2("tiny"), {"tp": 3}, r"tp=3 does not divide the 4 heads of 16 columns of h.0.attn.c_attn; .*2, 4"),
        (llama("tiny", mlp_width=30), {"tp": 4}, r"does not divide the 30 columns of layers.0.mlp.gate_proj"),
        # Numbers that fit the whole model, not one of its matrices.
        (llama("tiny", n_head=6, kv_heads=3, mlp_width=96), {"tp": 2}, r"the 3 heads .*; parallel.tp can be 3, 6$"),
        (gpt2("tiny", n_head=6, n_embd=48), {"tp": 4}, r"the 6 heads .*; parallel.tp can be 2, 3, 6$"),
        # Several ranks use one head of keys, and none of queries.
        (llama("tiny", n_head=4, kv_heads=2, head_dim=16), {"tp": 8}, r"the 4 heads of .*q_proj; .* can be 2, 4$"),
        (transformer(vocab_size=3), {"tp": 4}, r"4 ranks cannot share the 3 words of encoder.embedding"),
        (resnet50(), {}, r"this model does not say where: .*cut=\{\"fc\": Columns\(\) or Rows\(\), …\}"),
        (gpt2("tiny"), {"tp": 1}, r"parallel=tensor cuts layers among processes, and parallel.tp=1 is one"),
        (WHOLE_HEAD, {"sequence": True}, r"needs the vocabulary of head cut.*leave parallel.sequence out"),
        (tied(), {"sequence": True}, r"1.3.weight and 0.3.weight are one parameter .*leave parallel.sequence out"),
        (gpt2("tiny"), {"tp": 1, "name": "ddp", "sequence": True}, r"parallel.sequence=true .*set parallel.tp=2"),
        (gpt2("tiny"), {"name": "pipelined", "pp": 1}, r"pp=1 is one stage; use parallel=tensor, or parallel.pp=2"),
        (gpt2("tiny"), {"name": "single"}, r"parallel=single leaves layers whole, and parallel.tp=2 cuts them"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_cut_is_refused_with_its_numbers(chain, keys, words):
    with pytest.raises(PlanError, match=words):
        plan(chain, **keys)


@pytest.mark.parametrize("chain", [WHOLE_HEAD, tied()], ids=["whole head", "tied"])
def test_automatic_layouts_divide_no_sequence_where_a_run_refuses_that(chain):
    tokens = torch.zeros(64, 8, dtype=torch.int64)
    data = TensorData(tokens, tokens, vocab_size=9)
    data.prepare()
    assert TensorParallel.choices(chain, data, {}, 2) == [{"tp": n, "sequence": False} for n in (1, 2)]


@pytest.mark.parametrize(
    "table, words",
    [
        ({"h.*.attn.query": Columns()}, "'h.*.attn.query' names no module of this model, which has h.0.attn.c_attn"),
        ({"h.*.mlp.c_fc": "columns"}, r"has 'columns'; it takes Columns\(\), Rows\(\) or Vocabulary\(\)"),
        ({"h.*.mlp": Columns()}, "h.0.mlp has no parameters itself; .* inside it: h.0.mlp.c_fc, h.0.mlp.c_proj"),
        ({"h.*.ln_1": Columns()}, r"h.0.ln_1 has no matrix whose outputs Columns\(\) could divide"),
        ({"h.*.mlp.c_fc": Columns()}, r"h.0.mlp.c_fc have Columns\(\), and nothing in h.0 has Rows\(\)"),
        ({"h.*.mlp.c_fc": Vocabulary()}, r"h.0.mlp.c_fc is not the projection of a FusedHead"),
        ({"h.*.attn": Rows()}, r"h.0.attn is of the class Attention, and Rows\(\) cuts an nn.Linear"),
        ({"h.*.ln_1": Vocabulary()}, r"of the class LayerNorm, and Vocabulary\(\) cuts an nn.Embedding or nn.Linear"),
        ({"head.lm_head": Vocabulary()}, r"parameter, so cut head.lm_head and embedding.wte alike"),
        ({"embedding.wte": Vocabulary()}, r"parameter, so cut head.lm_head and embedding.wte alike"),
    ],
)
def test_a_table_that_does_not_fit_the_model_is_refused(table, words):
    with pytest.raises(ValueError, match=words):
        plan(replace(gpt2("tiny"), cut=table))


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class ScaledEmbedding(nn.Embedding):
    def forward(self, tokens):
        return 2 * super().forward(tokens)


@pytest.mark.parametrize(
    "module, cut, words",
    [
        (Scaled(4, 4), Rows(), r"module has a forward of its own \(Scaled\), which Rows\(\) would leave out"),
        (ScaledEmbedding(8, 4), Vocabulary(), r"a forward of its own \(ScaledEmbedding\), which Vocabulary\(\) would"),
        (nn.Embedding(8, 4, padding_idx=0), Vocabulary(), r"module has padding_idx or max_norm, which Vocabulary\(\)"),
        (nn.Embedding(8, 4, max_norm=0.1), Vocabulary(), r"module has padding_idx or max_norm, which Vocabulary\(\)"),
    ],
)
def test_a_module_that_computes_more_than_torch_s_is_refused(module, cut, words):
    with pytest.raises(ModelError, match=words):
        check_table({"module": cut}, nn.ModuleDict({"module": module}), {})


DROPOUTS = {
    "[b, t, c] of a sequence": (nn.Dropout(0.5), (2, 8, 6), 1, True, (2, 4, 6)),
    "[b t, c] of a sequence": (nn.Dropout(0.5), (16, 6), 0, True, (8, 6)),
    "positions of a sequence": (nn.Dropout1d(0.5), (2, 8, 6), 1, True, (2, 4, 6)),
    "columns": (nn.Dropout(0.5), (2, 8, 6), 2, False, (2, 8, 3)),
    "a column each": (nn.Dropout(0.5), (2, 8, 2), 2, False, (2, 8, 1)),
    "heads": (nn.Dropout(0.5), (2, 4, 8, 3), 1, False, (2, 2, 8, 3)),
    "whole heads": (nn.Dropout2d(0.5), (2, 4, 8, 3), 1, False, (2, 2, 8, 3)),
    "positions of some columns": (nn.Dropout1d(0.5), (2, 8, 6), 2, False, (2, 8, 3)),
}


@pytest.mark.parametrize("case", DROPOUTS)
def test_the_masks_of_the_ranks_are_parts_of_the_whole_one(case):
    module, shape, dim, divided, part = DROPOUTS[case]
    whole, *_ = masks(module, shape)
    parts = masks(module, part, ranks=2, divided=divided)
    joined = [p.unflatten(0, (2, -1)) for p in parts] if dim == 0 else parts  # rows of each sample
    assert torch.equal(torch.cat(joined, 1 if dim == 0 else dim).reshape(shape), whole)


@pytest.mark.parametrize("case", DROPOUTS)
def test_so_they_are_of_the_positions_that_a_rank_computes_of_a_longer_sequence(case):
    module, shape, dim, divided, part = DROPOUTS[case]
    longer, positions = (
        [16 if n == 8 else 32 if n == 16 else n for n in shape],
        torch.tensor([2, 3, 0, 1, 15, 14, 12, 13]),
    )
    whole, *_ = masks(module, longer)
    whole = whole.unflatten(0, (2, -1)) if dim == 0 else whole
    with sequence.computing_part(SimpleNamespace(positions=positions, length=16)):
        parts = masks(module, part, ranks=2, divided=divided)
    joined = torch.cat([p.unflatten(0, (2, -1)) for p in parts] if dim == 0 else parts, 1 if dim == 0 else dim)
    assert torch.equal(joined, whole[:, :, positions] if len(shape) == 4 else whole[:, positions])


def masks(module: nn.Module, shape: Sequence[int], ranks: int = 1, divided: bool = False) -> list[torch.Tensor]:
    """The masks of the ranks that divide two samples by positions, or by heads or columns."""
    layer, found = by_sample("layer", nn.Sequential(module)), []
    for index in range(ranks):
        layers = cutting(SimpleNamespace(axis=lambda name, i=index: Ranks([*range(ranks)], i)), sequence=True)
        layers._entered_input = None if divided else torch.ones(())
        layer[0].part = partial(layers._part_of, layer[0], False, divided) if ranks > 1 else None
        with computing(Samples(2, seed=1, step=1)):
            found.append(layer(torch.ones(shape)))
    return found


def test_of_keys_and_values_side_by_side_a_rank_uses_its_head_of_both():
    module, x = nn.Linear(4, 2 * 2 * 3, bias=False), torch.randn(2, 5, 4)  # keys of two heads, and values
    wanted = module(x).unflatten(-1, (2, 2, 3))[..., 1, :].flatten(-2)
    layers = cutting(SimpleNamespace(axis=lambda name: Ranks([*range(4)], 3)))
    layers._cut_columns("kv", module, Columns(groups=2, unit=3, shared=True), sequence_parallel=False)
    assert torch.equal(module(x), wanted)


def test_a_first_layer_without_positions_is_refused_where_they_are_to_be_divided():
    layer = torch.nn.Linear(4, 4)
    cutting(SimpleNamespace(axis=lambda name: Ranks([0, 1], 0)), sequence=True).prepare("embedding", layer)
    with pytest.raises(PlanError, match=r"\[b, t, \.\.\.\], among parallel.tp=2 ranks, and that is \(8, 4\)"):
        layer(torch.zeros(8, 4))


def test_the_vocabulary_may_be_cut_unequally_and_heads_of_keys_may_be_fewer():
    assert plan(gpt2("tiny", vocab_size=50257)).tp == 2
    assert plan(llama("tiny", kv_heads=1), tp=4).processes == 4
