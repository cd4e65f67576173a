"""The losses of image models: one class a sample, against logits of all classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.losses import IGNORED, ClassCrossEntropy, OneHotSquaredError

DRAWN = torch.Generator().manual_seed(1)
LOGITS, CLASSES = torch.randn(6, 10, generator=DRAWN), torch.randint(0, 10, (6,), generator=DRAWN)
WEIGHTS = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
CROSS_ENTROPY, SQUARED = ClassCrossEntropy(), OneHotSquaredError()


def one_hot_mean(logits, classes):
    return nn.MSELoss()(logits, nn.functional.one_hot(classes, 10).to(logits.dtype))


LOSSES = pytest.mark.parametrize(
    "loss, mean, terms",
    [(CROSS_ENTROPY, nn.CrossEntropyLoss(), 1), (SQUARED, one_hot_mean, 10)],
    ids=["cross entropy", "one-hot squared error"],
)


@LOSSES
def test_sum_over_count_is_torch_s_mean(loss, mean, terms):
    sums = loss(LOGITS, CLASSES, None)
    assert sums.count == terms * 6
    assert (sums.loss / sums.count).item() == pytest.approx(mean(LOGITS, CLASSES).item(), rel=1e-6)
    exact = loss(LOGITS.double(), CLASSES, None)
    assert exact.loss.dtype == torch.float64


@LOSSES
def test_ignored_and_weightless_samples_count_nothing_and_get_no_gradient(loss, mean, terms):
    logits, classes = LOGITS.clone().requires_grad_(), CLASSES.clone()
    classes[0] = IGNORED
    counted = [1, 3, 4]
    sums, alone = loss(logits, classes, WEIGHTS), loss(LOGITS[counted], CLASSES[counted], None)
    assert sums.stack().tolist() == pytest.approx(alone.stack().tolist(), rel=1e-6)
    assert sums.count == 3 * terms
    sums.loss.backward()
    assert [bool(row.any()) for row in logits.grad] == [i in counted for i in range(6)]


@LOSSES
def test_a_batch_that_counts_nothing_is_zero_of_zero(loss, mean, terms):
    for classes, weights in ((CLASSES, torch.zeros(6)), (torch.full_like(CLASSES, IGNORED), None)):
        assert not loss(LOGITS, classes, weights).stack().any()


@LOSSES
def test_bf16_logits_are_summed_in_float32_under_autocast(loss, mean, terms):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = loss(LOGITS.bfloat16(), CLASSES, None)
    assert sums.loss.dtype == torch.float32
    assert sums.loss.item() == pytest.approx(loss(LOGITS.bfloat16().float(), CLASSES, None).loss.item(), rel=1e-6)


def test_accuracy_counts_the_samples_whose_largest_logit_is_theirs():
    classes = LOGITS.argmax(dim=1)
    classes[3] = (classes[3] + 1) % 10  # a wrong one
    classes[4] = IGNORED
    assert CROSS_ENTROPY.metrics == ("accuracy",)
    assert CROSS_ENTROPY(LOGITS, classes, None).metrics[0] == 4
    assert CROSS_ENTROPY(LOGITS, classes, WEIGHTS).metrics[0] == 2


def test_squared_error_has_no_metrics():
    assert SQUARED.metrics == SQUARED(LOGITS, CLASSES, None).metrics == ()
