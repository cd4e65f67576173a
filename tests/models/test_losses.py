"""Losses as sums and counts: padding counts nothing, and the mean over everything is the usual one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.losses import IGNORED, SquaredError, Sums, TokenCrossEntropy, mask_targets, per_element

DRAWN = torch.Generator().manual_seed(1)
OUTPUT, TARGETS = torch.randn(4, 5, generator=DRAWN), torch.randn(4, 5, generator=DRAWN)
LOGITS, WORDS = torch.randn(4, 6, 9, generator=DRAWN), torch.randint(0, 9, (4, 6), generator=DRAWN)
PADDED = torch.tensor([1.0, 1.0, 1.0, 0.0])
CASES = pytest.mark.parametrize(
    "loss, output, targets, mean",
    [
        (SquaredError(), OUTPUT, TARGETS, nn.MSELoss()),
        (TokenCrossEntropy(), LOGITS, WORDS, lambda o, t: nn.CrossEntropyLoss()(o.flatten(0, 1), t.flatten())),
    ],
    ids=["squared error", "cross entropy"],
)


@CASES
def test_sum_over_count_is_torch_s_mean(loss, output, targets, mean):
    sums = loss(output, targets, None)
    assert (sums.loss / sums.count).item() == pytest.approx(mean(output, targets).item(), rel=1e-6)
    assert sums.count == targets.numel()


@CASES
def test_a_sample_of_weight_zero_counts_nothing(loss, output, targets, mean):
    padded, without = loss(output, targets, PADDED), loss(output[:3], targets[:3], None)
    assert padded.count == without.count == targets[:3].numel()
    assert padded.loss.item() == pytest.approx(without.loss.item(), rel=1e-6)


@CASES
def test_a_sample_of_weight_zero_gets_no_gradient(loss, output, targets, mean):
    output = output.clone().requires_grad_()
    loss(output, targets, PADDED).loss.backward()
    assert not output.grad[3].any()
    assert output.grad[:3].any()


@CASES
def test_micro_batches_add_up_to_the_batch_where_means_of_means_would_not(loss, output, targets, mean):
    pieces = [loss(output[a:b], targets[a:b], PADDED[a:b]).stack() for a, b in ((0, 2), (2, 4))]
    whole = loss(output, targets, PADDED).stack()
    assert sum(pieces).tolist() == pytest.approx(whole.tolist(), rel=1e-6)
    mean_of_means = sum(piece[0] / piece[1] for piece in pieces) / 2
    assert mean_of_means.item() != pytest.approx((whole[0] / whole[1]).item(), rel=1e-3)


@CASES
def test_a_batch_of_padding_only_is_zero_of_zero(loss, output, targets, mean):
    assert loss(output, targets, torch.zeros(4)).stack().tolist() == [0.0, 0.0]


@CASES
def test_bf16_outputs_are_summed_in_float32(loss, output, targets, mean):
    sums = loss(output.bfloat16(), targets, None)
    exact = loss(output.bfloat16().float(), targets, None)
    assert sums.loss.dtype == torch.float32
    assert sums.loss.item() == pytest.approx(exact.loss.item(), rel=1e-6)


def test_stacked_sums_are_float64_without_a_graph():
    stacked = Sums(torch.ones((), requires_grad=True), torch.tensor(3), (torch.tensor(2.0),)).stack()
    assert stacked.tolist() == [1.0, 3.0, 2.0]
    assert stacked.dtype == torch.float64
    assert not stacked.requires_grad


def test_weights_are_spread_over_all_elements_of_a_sample():
    assert per_element(torch.tensor([2.0, 0.0]), torch.empty(2, 1, 3)).tolist() == [[[2.0] * 3], [[0.0] * 3]]


def test_only_targets_of_weightless_samples_are_masked():
    targets = torch.tensor([[1, 2], [3, 4]])
    assert mask_targets(targets, torch.tensor([0.0, 0.5])).tolist() == [[IGNORED, IGNORED], [3, 4]]
    assert mask_targets(targets, None) is targets
