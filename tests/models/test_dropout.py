"""Dropout by sample: the mask of a sample is its own, whatever it is computed with."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from interpreted import interpreted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.errors import ModelError
from models import seeds, sequence
from models.attention import attend
from models.chain import Chain, LayerSpec
from models.losses import SquaredError
from models.seeds import Part, Samples, by_sample, computing
from parallel.stage import Stage

CPU = torch.device("cpu")
SHAPES = {nn.Dropout: (8, 5, 6), nn.Dropout1d: (8, 5, 6), nn.Dropout2d: (8, 6, 5, 4), nn.Dropout3d: (8, 6, 2, 3, 4)}


def ones(*shape: int, **more) -> Tensor:
    return torch.ones(*shape, **more)


def layer(build, name: str = "h.0") -> nn.Module:
    """The layer as a chain builds it."""
    return Chain([LayerSpec(name, build)], loss=SquaredError()).skeleton()[name]


def dropped(module: nn.Module, *tensors: Tensor, first: int = 0, step: int = 1, count: int | None = None) -> Tensor:
    with computing(Samples(count or len(tensors[0]), first, seed=3, step=step)):
        return module(*tensors)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_batch_in_pieces_has_the_masks_of_the_whole(kind):
    module, x = layer(lambda: kind(0.5)), ones(*SHAPES[kind])
    whole = dropped(module, x)
    pieces = [dropped(module, piece, first=first) for first, piece in zip((0, 3, 4), x.split([3, 1, 4]), strict=True)]
    assert torch.equal(torch.cat(pieces), whole)
    assert set(whole.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(whole[0], whole[1]) and not torch.equal(dropped(module, x, step=2), whole)
    if kind is not nn.Dropout:
        assert torch.equal(whole, whole[:, :, :1].expand_as(whole)) or kind is not nn.Dropout1d
        channels = whole.flatten(2)
        assert torch.equal(channels.amin(2), channels.amax(2)), "a channel is dropped out as a whole"


def test_it_drops_the_share_that_it_is_told_to():
    module = layer(lambda: nn.Dropout(0.3))
    share = (dropped(module, ones(16, 10_000)) == 0).double().mean(dim=1)
    assert (share - 0.3).abs().max() < 0.02
    assert not dropped(layer(lambda: nn.Dropout(1.0)), ones(4, 8)).any()


def test_memory_order_changes_nothing():
    module, x = layer(lambda: nn.Dropout(0.5)), ones(4, 3, 5, 6)
    assert torch.equal(dropped(module, x.contiguous(memory_format=torch.channels_last)), dropped(module, x))


def test_rows_that_follow_each_other_are_one_sample():
    module = layer(lambda: nn.Dropout(0.5))
    whole = dropped(module, ones(8, 5, 6))
    assert torch.equal(dropped(module, ones(40, 6), count=8), whole.flatten(0, 1))
    assert torch.equal(dropped(module, ones(10, 6), count=2, first=3), whole[3:5].flatten(0, 1))


class Twice(nn.Module):
    """One module, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack((self.drop(x), self.drop(x)), dim=1)


class Again(Twice):
    """Recomputes a part of itself in the backward, after other micro-batches were computed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) + checkpoint(super().forward, x, use_reentrant=False).sum(1)


def test_a_second_call_draws_other_masks_and_a_batch_in_pieces_the_same():
    module, x = layer(Twice), ones(8, 6)
    whole = dropped(module, x)
    assert not torch.equal(whole[:, 0], whole[:, 1])
    assert torch.equal(torch.cat([dropped(module, x[:4]), dropped(module, x[4:], first=4)]), whole)


def test_a_layer_that_recomputes_a_part_of_itself_gets_the_same_masks_again():
    chain = Chain([LayerSpec("h.0", Again)], loss=SquaredError())
    stage = Stage(chain, chain.names, seed=3, device=CPU)
    stage.begin(training=True, step=1)
    inputs = [ones(4, 6).requires_grad_() for _ in range(2)]
    outputs = [stage(x, samples=(4 * i, 4)) for i, x in enumerate(inputs)]
    for x, y in zip(inputs, outputs, strict=True):
        y.sum().backward()
        assert torch.equal(x.grad, y.detach()), "of a sum of masked ones, the gradient is the masks"
    stage.end()


def test_outside_of_a_training_step_it_is_torch_s():
    module, x = layer(lambda: nn.Dropout(0.5)), ones(4, 8)
    torch.manual_seed(1)
    wanted = F.dropout(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(module(x), wanted)
    assert torch.equal(dropped(module.eval(), x), x)


def test_in_place_it_changes_its_input():
    x = ones(4, 8)
    assert dropped(layer(lambda: nn.Dropout(0.5, inplace=True)), x) is x
    assert torch.equal(x, dropped(layer(lambda: nn.Dropout(0.5)), ones(4, 8)))


def test_what_torch_s_dropout_drops_out_is_dropped_out_by_sample_and_nothing_else():
    net = layer(lambda: nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5)))
    assert [isinstance(module, seeds.BySample) for module in net] == [True, False]
    assert net[0].full_name == "h.0.0"


def test_attention_drops_out_its_probabilities_by_sample():
    module = by_sample("h.0", nn.Dropout(0.25))
    q, k, v = torch.randn(3, 4, 2, 7, 8, generator=torch.Generator().manual_seed(1))
    attended = partial(attend, dropout=module)
    whole = dropped(attended, q, k, v)
    assert torch.equal(dropped(attended, q[2:], k[2:], v[2:], first=2), whole[2:])
    assert not torch.equal(dropped(attended, q, k, v, step=2), whole)


@pytest.mark.parametrize("heads", [None, range(2, 4)], ids=["all heads", "some heads"])
def test_the_mask_of_probabilities_can_be_made_in_blocks(heads):
    module = by_sample("h.0", nn.Dropout(0.25))
    whole = dropped(module, ones(4, 6, 8, 8))
    drawn = dropped(module.draw, ones(4, 6, 4, 5))
    rows, columns = torch.tensor([3, 2, 7]), torch.tensor([0, 6])
    parts = {2: Part(rows, 8), 3: Part(columns, 8)} | ({} if heads is None else {1: Part(heads, 6)})
    wanted = whole[:, slice(None) if heads is None else list(heads)][:, :, rows][..., columns]
    for _ in range(2):
        assert torch.equal(drawn.mask(torch.zeros_like(wanted), parts), wanted)
    assert dropped(module.eval().draw, whole) is None
    with pytest.raises(ModelError, match=r"h.0 gets \(4, 6, 4, 5\), whose rows are no samples of a step"):
        module.train().draw(ones(4, 6, 4, 5))


def test_dropout_under_a_part_of_a_sequence_needs_positions():
    part = SimpleNamespace(positions=torch.arange(4), length=8)
    with sequence.computing_part(part), pytest.raises(ModelError, match=r"h.0 gets \(2, 5, 6\).* 4 positions .* of 8"):
        dropped(by_sample("h.0", nn.Dropout(0.5)), ones(2, 5, 6))
    with sequence.computing_part(part):  # one number for all positions
        dropped(by_sample("h.0", nn.Dropout2d(0.5)), ones(2, 3, 4, 6))


@pytest.fixture(scope="module")
def kernel():
    """``drop_out``, interpreted."""
    interpreted("dropout_kernel")
    return seeds._InKernel.apply


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(4, 1), (6, 3, 5), (2, 5003)])
def test_the_kernel_for_gpus_draws_the_same_masks(kernel, shape, dtype):
    for p in (0.1, 0.5, 1.0):
        mask = seeds._mask(torch.empty(shape, dtype=dtype), 2**62 + 17, 2**33, 2, p)
        turned = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
        for x in (torch.randn(shape).to(dtype), turned.to(dtype)):
            torch.testing.assert_close(kernel(x, 2**62 + 17, 2**33, 2, p), x * mask)


@pytest.mark.parametrize(
    "module, warning",
    [(None, 0), (SimpleNamespace(drop_out=lambda x, *_: x), 1)],
    ids=["is not there", "computes something else"],
)
def test_where_the_kernel_fails_torch_s_operators_draw(monkeypatch, recwarn, module, warning):
    monkeypatch.setitem(sys.modules, "models.dropout_kernel", module)
    seeds._kernel_works.cache_clear()
    assert not seeds._kernel_works(CPU)
    assert len([one for one in recwarn if "dropout is computed without its" in str(one.message)]) == warning
    seeds._kernel_works.cache_clear()
