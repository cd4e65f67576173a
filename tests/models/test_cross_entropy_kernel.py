"""The kernel for GPUs, run by Triton's interpreter on the CPU."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from interpreted import interpreted

from models import fused_cross_entropy as fused
from models.losses import IGNORED, TokenCrossEntropy

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="module")
def rows():
    """``cross_entropy_rows``, interpreted."""
    return interpreted("cross_entropy_kernel").cross_entropy_rows


def drawn(n, words, dtype, scale=3.0):
    generator = torch.Generator().manual_seed(n * words)
    logits = (scale * torch.randn(n, words, generator=generator)).to(dtype)
    targets = torch.randint(words, (n,), generator=generator)
    targets[1::3] = IGNORED
    return logits, targets


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("n, words", [(1, 1), (2, 3), (7, 97), (3, 4096), (4, 5003), (2, 50257)])
def test_losses_and_gradients_are_torch_s(rows, n, words, dtype):
    logits, targets = drawn(n, words, dtype)
    wide = logits.float().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="none", ignore_index=IGNORED)
    (gradient,) = torch.autograd.grad(expected.sum(), wide)
    without = rows(logits, targets, False)
    assert torch.equal(logits.float(), wide), "logits without a gradient are left as they are"
    losses = rows(logits, targets, True)
    assert torch.equal(losses, without)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    counted = targets != IGNORED
    torch.testing.assert_close(
        logits[counted].float(), gradient[counted], rtol=TOLERANCE[dtype], atol=1e-7 if words > 4 else 1e-6
    )


def test_large_logits_do_not_overflow_and_what_is_not_finite_is_noticed(rows):
    logits, targets = drawn(4, 5003, torch.float32, scale=1e4)
    assert torch.isfinite(rows(logits.clone(), targets, True)).all()
    logits[0, 4999] = float("nan")
    assert rows(logits, targets, False)[0].isnan()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("n, words", [(2, 3), (7, 97), (4, 5003)])
def test_ranks_that_share_the_words_get_the_same_losses_and_gradients(rows, monkeypatch, n, words, dtype):
    """Two ranks, the second with a word more where they are odd; what they exchange is computed here."""
    monkeypatch.setattr(fused, "_has_kernel", lambda logits: True)
    whole, targets = drawn(n, words, dtype)
    parts = [part.clone() for part in whole.tensor_split([words // 2], dim=1)]
    columns = [targets.clone(), targets - words // 2]
    for part, column in zip(parts, columns, strict=True):
        column[(targets == IGNORED) | (column < 0) | (column >= part.shape[1])] = -1
    found = torch.stack([fused._statistics(part, column) for part, column in zip(parts, columns, strict=True)])
    most = found[:, 0].amax(dim=0)
    total = (found[:, 1] * (found[:, 0] - most).exp()).sum(dim=0)
    counted = targets != IGNORED
    losses = (most + total.log() - found[:, 2].sum(dim=0)) * counted
    torch.testing.assert_close(losses, rows(whole, targets, True), rtol=1e-5, atol=1e-5)
    for part, column in zip(parts, columns, strict=True):
        fused._gradient(part, column, most, total)
    both = torch.cat(parts, dim=1)
    torch.testing.assert_close(both[counted], whole[counted], rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("smoothing, z", [(0.1, 0.0), (0.0, 0.3), (0.2, 0.01)])
def test_gradients_with_label_smoothing_and_z_loss_are_torch_s(rows, monkeypatch, smoothing, z, dtype):
    monkeypatch.setattr(fused, "_has_kernel", lambda logits: True)
    logits, targets = drawn(7, 5003, dtype)
    wide = logits.float().clone().requires_grad_()
    loss = F.cross_entropy(wide, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing)
    loss = loss + z * wide.logsumexp(1)[targets != IGNORED].square().sum()
    counted, (gradient,) = targets != IGNORED, torch.autograd.grad(loss, wide)
    found, _ = fused._by_statistics(logits, targets, True, None, TokenCrossEntropy(smoothing, z))
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(logits[counted].float(), gradient[counted], rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_head_learns_the_same_with_it(rows, monkeypatch, dtype):
    """Through the operator that a GPU takes, gradients of hidden states, weight and bias included."""

    def gradients(operator):
        generator = torch.Generator().manual_seed(3)
        x, weight, bias = (torch.randn(s, generator=generator) for s in ((9, 8), (301, 8), (301,)))
        leaves = [x.to(dtype).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
        if operator:
            monkeypatch.setattr(fused, "_has_kernel", lambda logits: True)
        targets = torch.arange(9) * 30
        targets[4] = IGNORED
        (loss,) = fused.fused_cross_entropy(leaves[0], weight, weight.detach().to(dtype), targets, bias)
        return loss.detach(), *torch.autograd.grad(2 * loss, leaves)

    fused._kernel_works.cache_clear()
    assert fused._kernel_works(torch.device("cpu"), dtype), "the check of the kernel against torch passes"
    reference = gradients(False)
    for mine, theirs in zip(gradients(True), reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def fails(logits, targets, gradient):
    raise RuntimeError("no C compiler\nand much more")


def wrong(logits, targets, gradient):
    return torch.zeros(len(targets))


SHARED = dict.fromkeys(("statistics_of_rows", "gradient_of_rows"))


@pytest.mark.parametrize(
    "module, warning",
    [
        (None, None),
        (SimpleNamespace(cross_entropy_rows=fails, **SHARED), "RuntimeError: no C compiler"),
        (SimpleNamespace(cross_entropy_rows=wrong, **SHARED), "AssertionError"),
    ],
    ids=["is not there", "cannot be built", "computes something else"],
)
def test_where_the_kernel_fails_torch_s_operators_compute_the_same(monkeypatch, recwarn, module, warning):
    monkeypatch.setitem(sys.modules, "models.cross_entropy_kernel", module)
    fused._kernel_works.cache_clear()
    logits, targets = drawn(5, 40, torch.float32)
    expected = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    monkeypatch.setattr(fused, "_has_kernel", lambda logits: fused._kernel_works(logits.device, logits.dtype))
    torch.testing.assert_close(fused._row_wise(logits, targets, True), expected)
    said = [str(one.message) for one in recwarn if "cross entropy is computed without" in str(one.message)]
    assert len(said) == (warning is not None) and all(warning in message for message in said)
    fused._kernel_works.cache_clear()
