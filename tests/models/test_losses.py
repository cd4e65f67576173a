"""Losses as sums and counts: padding counts nothing, and the mean over everything is the usual one."""

import copy
import math

import pytest
import torch
from torch import nn

from common.errors import ModelError
from models.losses import (
    IGNORED,
    ClassCrossEntropy,
    OneHotSquaredError,
    Several,
    SquaredError,
    Sums,
    TokenCrossEntropy,
    as_sums,
    check_is_loss,
)

DRAWN = torch.Generator().manual_seed(1)
OUTPUT, TARGETS = torch.randn(4, 5, generator=DRAWN), torch.randn(4, 5, generator=DRAWN)
LOGITS, WORDS = torch.randn(4, 6, 9, generator=DRAWN), torch.randint(0, 9, (4, 6), generator=DRAWN)
CLASS_LOGITS, CLASSES = torch.randn(6, 10, generator=DRAWN), torch.randint(0, 10, (6,), generator=DRAWN)
OF_CLASSES = ["class cross entropy", "one-hot squared error", "nn.CrossEntropyLoss"]


def token_mean(logits, words):
    return nn.CrossEntropyLoss()(logits.flatten(0, 1), words.flatten())


def one_hot_mean(logits, classes):
    return nn.MSELoss()(logits, nn.functional.one_hot(classes, 10).to(logits.dtype))


# The loss, outputs and targets, torch's mean of the same, and the terms of a sample.
LOSSES = {
    "squared error": (SquaredError(), OUTPUT, TARGETS, nn.MSELoss(), 5),
    "cross entropy": (TokenCrossEntropy(), LOGITS, WORDS, token_mean, 6),
    "class cross entropy": (ClassCrossEntropy(), CLASS_LOGITS, CLASSES, nn.CrossEntropyLoss(), 1),
    "one-hot squared error": (OneHotSquaredError(), CLASS_LOGITS, CLASSES, one_hot_mean, 10),
    "nn.CrossEntropyLoss": (as_sums(nn.CrossEntropyLoss()), CLASS_LOGITS, CLASSES, nn.CrossEntropyLoss(), 1),
    "nn.MSELoss": (as_sums(nn.MSELoss()), OUTPUT, TARGETS, nn.MSELoss(), 5),
    "nn.BCEWithLogitsLoss": (as_sums(nn.BCEWithLogitsLoss()), OUTPUT, TARGETS.sigmoid(), nn.BCEWithLogitsLoss(), 5),
}
CASES = pytest.mark.parametrize("loss, output, targets, mean, terms", LOSSES.values(), ids=LOSSES)


@CASES
def test_sum_over_count_is_torch_s_mean(loss, output, targets, mean, terms):
    sums = loss(output, targets, None)
    assert sums.count == terms * len(targets) == getattr(loss, "count", lambda _: sums.count)(targets)
    assert (sums.loss / sums.count).item() == pytest.approx(mean(output, targets).item(), rel=1e-6)
    exact = targets.double() if targets.is_floating_point() else targets
    assert loss(output.double(), exact, None).loss.dtype == torch.float64


@CASES
def test_a_sample_of_weight_zero_counts_nothing_and_gets_no_gradient(loss, output, targets, mean, terms):
    output, kept = output.clone().requires_grad_(), torch.tensor([1, 0, 2, 3][: len(targets) - 1])
    weights = torch.zeros(len(targets)).index_fill(0, kept, 1.0)
    padded, without = loss(output, targets, weights), loss(output[kept], targets[kept], None)
    assert padded.count == len(kept) * terms
    assert padded.stack().tolist() == pytest.approx(without.stack().tolist(), rel=1e-6)
    padded.loss.backward()
    assert [bool(row.any()) for row in output.grad] == (weights > 0).tolist()
    assert not loss(output, targets, torch.zeros(len(targets))).stack().any(), "padding only"


@CASES
def test_bf16_outputs_are_summed_in_float32_under_autocast(loss, output, targets, mean, terms):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = loss(output.bfloat16(), targets, None)
    assert sums.loss.dtype == torch.float32
    assert sums.loss.item() == pytest.approx(loss(output.bfloat16().float(), targets, None).loss.item(), rel=1e-6)


@pytest.mark.parametrize("name", OF_CLASSES)
def test_ignored_targets_count_nothing(name):
    loss, logits, classes, _, terms = LOSSES[name]
    some = classes.clone()
    some[0] = IGNORED
    assert loss(logits, some, None).stack().tolist() == pytest.approx(
        loss(logits[1:], classes[1:], None).stack().tolist(), rel=1e-6
    )
    assert not loss(logits, torch.full_like(classes, IGNORED), None).stack().any()


SOME_IGNORED = CLASSES.index_fill(0, torch.tensor([1, 4]), 3)
SEVERAL, IMAGES = torch.randn(4, 9, 6, generator=DRAWN), torch.randint(0, 9, (4, 6), generator=DRAWN)
BY_CLASS = torch.rand(10, generator=DRAWN)
OF_TORCH = {
    "classes": (nn.CrossEntropyLoss(), CLASS_LOGITS, CLASSES),
    "ignored": (nn.CrossEntropyLoss(ignore_index=3), CLASS_LOGITS, SOME_IGNORED),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3), CLASS_LOGITS, SOME_IGNORED),
    "weighed": (nn.CrossEntropyLoss(BY_CLASS, label_smoothing=0.1, ignore_index=3), CLASS_LOGITS, SOME_IGNORED),
    "of places": (nn.CrossEntropyLoss(), SEVERAL, IMAGES),
    "probabilities": (nn.CrossEntropyLoss(label_smoothing=0.1), SEVERAL, SEVERAL.flip(0).softmax(1)),
    "of weighed classes": (nn.CrossEntropyLoss(BY_CLASS), CLASS_LOGITS, CLASS_LOGITS.flip(0).softmax(1)),
    "yes or no": (nn.BCEWithLogitsLoss(pos_weight=BY_CLASS), CLASS_LOGITS, (CLASS_LOGITS.flip(0) > 0).float()),
    "smooth": (nn.SmoothL1Loss(beta=0.5), OUTPUT, TARGETS),
}


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("dtype, equal", [(torch.float32, 2e-7), (torch.float64, 1e-14)], ids=str)
def test_a_loss_of_torch_is_a_sum_and_a_count_that_give_its_mean_and_its_gradient_over_all_micro_batches(
    name, dtype, equal
):
    loss, output, targets = OF_TORCH[name]
    loss, output = copy.deepcopy(loss).to(dtype), output.to(dtype).requires_grad_()
    targets = targets.to(dtype) if targets.is_floating_point() else targets
    mean = loss(output, targets)
    (expected,) = torch.autograd.grad(mean, output)
    sums = [as_sums(loss)(output[part], targets[part], None) for part in (slice(0, 3), slice(3, None))]
    total = sum(part.loss for part in sums) / sum(part.count for part in sums)
    assert total.item() == pytest.approx(mean.item(), rel=equal)
    (gradient,) = torch.autograd.grad(total, output)
    torch.testing.assert_close(gradient, expected, rtol=10 * equal, atol=equal)
    padded = as_sums(loss)(output, targets, torch.ones(len(targets)).index_fill(0, torch.tensor([0]), 0.0))
    without = as_sums(loss)(output[1:], targets[1:], None)
    assert padded.stack().tolist() == pytest.approx(without.stack().tolist(), rel=1e-6)


def test_accuracy_counts_the_samples_whose_largest_logit_is_theirs():
    classes, loss = CLASS_LOGITS.argmax(dim=1), ClassCrossEntropy()
    classes[3] = (classes[3] + 1) % 10  # a wrong one
    classes[4] = IGNORED
    assert loss.metrics == ("accuracy",)
    assert loss(CLASS_LOGITS, classes, None).metrics[0] == 4
    assert loss(CLASS_LOGITS, classes, torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0])).metrics[0] == 2


def test_stacked_sums_are_float64_without_a_graph():
    stacked = Sums(torch.ones((), requires_grad=True), torch.tensor(3), (torch.tensor(2.0),)).stack()
    assert stacked.tolist() == [1.0, 3.0, 2.0]
    assert stacked.dtype == torch.float64 and not stacked.requires_grad


class Temperature(nn.Linear):
    metrics = ()


class Penalty(ClassCrossEntropy):
    """Keeps the model, of which a run trains a copy."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net


@pytest.mark.parametrize("build", [lambda net: net, Penalty], ids=["own", "the model's"])
def test_a_loss_with_parameters_is_refused_because_no_run_would_train_them(build):
    loss = build(net := Temperature(2, 2))
    with pytest.raises(ModelError, match=rf"{type(loss).__name__} has parameters \(weight, bias\), which no run would"):
        check_is_loss(loss)
    net.requires_grad_(False)
    check_is_loss(loss)


def test_one_of_several_losses_for_which_no_target_counts_adds_nothing_and_has_no_mean():
    several = Several({"kind": ClassCrossEntropy(), "size": SquaredError()}, {"size": 0.5})
    kinds, sizes = torch.full_like(CLASSES, IGNORED), torch.randn(6, 5, generator=DRAWN)
    outputs = CLASS_LOGITS.detach().requires_grad_(), OUTPUT.detach()[[0, 1, 2, 3, 0, 1]].requires_grad_()
    several.totals = several.counts((kinds, sizes))
    sums = several(outputs, (kinds, sizes), None)
    (sums.loss / sums.count).backward()
    mean = nn.MSELoss()(outputs[1], sizes)
    assert not outputs[0].grad.any()
    torch.testing.assert_close(outputs[1].grad, torch.autograd.grad(mean / 2, outputs[1])[0])
    found = several.means([metric.item() for metric in sums.metrics])
    assert math.isnan(found["kind_loss"]) and found["kind_count"] == 0 and found["size_count"] == 30
    assert found["loss"] == pytest.approx(mean.item() / 2) and found["size_loss"] == pytest.approx(mean.item())
