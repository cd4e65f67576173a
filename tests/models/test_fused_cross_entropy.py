"""The fused linear + cross entropy is the plain pair."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from models import fused_cross_entropy as fused
from models.fused_cross_entropy import CPU_ROWS, FusedHead
from models.losses import IGNORED, TokenCrossEntropy

CLASSES, WIDTH = 53, 12


def problem(rows: int, dtype: torch.dtype = torch.float64, ignored: str = "none"):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, CLASSES, (rows,), generator=generator)
    if ignored == "some":
        targets[::3] = IGNORED
    elif ignored == "a block":
        targets[CPU_ROWS : 2 * CPU_ROWS] = IGNORED
    elif ignored == "all":
        targets[:] = IGNORED
    return x, weight, targets


def fused_cross_entropy(*parts, **more):
    loss, *_ = fused.fused_cross_entropy(*parts, **more)
    return loss


def plain(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight), targets, reduction="sum", ignore_index=IGNORED)


def loss_and_gradients(function, x, weight, *rest):
    loss = function(x, weight, *rest)
    return loss.detach(), *torch.autograd.grad(3.0 * loss, (x, weight))


def far(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """Distance relative to the size of what is wanted (absolute where that is 0)."""
    size = wanted.norm().item()
    return (value.to(wanted.dtype) - wanted).norm().item() / (size or 1.0)


@pytest.mark.parametrize("ignored", ["none", "some", "a block", "all"])
@pytest.mark.parametrize("rows", [1, 37, 3 * CPU_ROWS])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
def test_loss_and_gradients_are_those_of_linear_and_cross_entropy(rows, ignored, dtype, tolerance):
    x, weight, targets = problem(rows, dtype, ignored)
    values = loss_and_gradients(fused_cross_entropy, x, weight, weight.detach(), targets)
    for value, wanted in zip(values, loss_and_gradients(plain, x, weight, targets), strict=True):
        assert value.dtype == dtype
        assert far(value, wanted) < tolerance


def with_terms(x, weight, targets, smoothing, z, bias=None):
    logits = F.linear(x, weight, bias)
    loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=smoothing)
    return loss + z * logits.logsumexp(1)[targets != IGNORED].square().sum()


@pytest.mark.parametrize("smoothing, z", [(0.1, 0.0), (0.0, 0.3), (0.2, 0.01), (0.1, -0.4)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_label_smoothing_and_the_z_loss_are_added_to_loss_and_gradients(dtype, tolerance, smoothing, z):
    x, weight, targets = problem(37, dtype, "some")
    terms = TokenCrossEntropy(smoothing, z)
    found = fused.fused_cross_entropy(x, weight, weight.detach(), targets, loss=terms)
    values = [found[0], *torch.autograd.grad(3.0 * found[0], (x, weight))]
    wanted = with_terms(x, weight, targets, smoothing, z)
    for value, reference in zip(values, [wanted, *torch.autograd.grad(3.0 * wanted, (x, weight))], strict=True):
        assert value.dtype == dtype and far(value.detach(), reference.detach()) < tolerance
    of_tokens = plain(x, weight, targets).detach()
    assert not found[1].requires_grad and far(found[1], of_tokens) < tolerance
    logits = F.linear(x, weight).view(1, 37, CLASSES)
    sums = terms(logits, targets[None], None)
    assert far(sums.loss.detach(), wanted.detach()) < tolerance and far(sums.metrics[0], of_tokens) < tolerance
    with torch.no_grad():
        kept = fused.fused_cross_entropy(x, weight, weight.detach(), targets, loss=terms)
    assert [far(a, b.detach()) for a, b in zip(kept, found, strict=True)] == [0.0, 0.0]


class Head(FusedHead):
    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(WIDTH, CLASSES)


@pytest.mark.parametrize("target", [-1, CLASSES])
@pytest.mark.parametrize("shared", [False, True])
def test_a_target_that_is_no_word_is_an_error_wherever_the_words_are(target, shared):
    head, targets = Head(), torch.tensor([[0, target, IGNORED]])
    if shared:
        head.vocabulary = SimpleNamespace(start=0, count=CLASSES, enter=lambda hidden: hidden)
    with pytest.raises(RuntimeError, match="targets must be from 0 to 52, or -100, which is not counted"):
        head.loss(torch.ones(1, 3, WIDTH), targets, None)


def test_bf16_is_as_close_to_float64_as_bf16_s_own_rounding():
    """No farther than twice what the plain pair in bf16, with its float32 softmax, is away."""
    x, weight, targets = problem(37, torch.float64, "some")
    exact = loss_and_gradients(plain, x, weight, targets)
    half_x = x.detach().bfloat16().requires_grad_()
    parameter = weight.detach().float().requires_grad_()
    values = loss_and_gradients(fused_cross_entropy, half_x, parameter, parameter.detach().bfloat16(), targets)

    def plain_half(x, weight, targets):
        logits = F.linear(x, weight.bfloat16()).float()
        return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)

    usual = loss_and_gradients(plain_half, half_x, parameter, targets)
    assert [value.dtype for value in values] == [torch.float32, torch.bfloat16, torch.float32]
    for value, other, wanted in zip(values, usual, exact, strict=True):
        assert 0 < far(value, wanted) < max(2 * far(other, wanted), 2.0**-8)
        assert far(value, wanted) < 2.0**-5


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.bfloat16, 2.0**-5)], ids=["fp64", "bf16"])
def test_a_bias_is_part_of_the_layer_and_learns(dtype, tolerance):
    x, weight, targets = problem(37, torch.float64, "some")
    bias = torch.randn(CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logits = F.linear(x, weight, bias)
    exact = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    wanted = [exact.detach(), *torch.autograd.grad(3.0 * exact, (x, weight, bias))]
    half = x.detach().to(dtype).requires_grad_()
    loss = fused_cross_entropy(half, weight, weight.detach().to(dtype), targets, bias)
    values = [loss.detach(), *torch.autograd.grad(3.0 * loss, (half, weight, bias))]
    assert values[3].dtype == bias.dtype
    for value, reference in zip(values, wanted, strict=True):
        assert far(value, reference) < tolerance


def test_a_float16_loss_scale_does_not_overflow_the_gradients():
    x, weight, targets = problem(37, torch.float32)
    half = x.detach().half().requires_grad_()
    loss = fused_cross_entropy(half, weight, weight.detach().half(), targets)
    wanted = loss_and_gradients(plain, x, weight, targets)[2] / 3.0
    (gradient,) = torch.autograd.grad(65536.0 * loss, weight)
    assert far(gradient / 65536.0, wanted) < 2e-3


def test_extreme_logits_stay_finite():
    x, weight, targets = problem(37, torch.float32)
    x = (1e4 * x.detach()).requires_grad_()
    values = loss_and_gradients(fused_cross_entropy, x, weight, weight.detach(), targets)
    for value, wanted in zip(values, loss_and_gradients(plain, x, weight, targets), strict=True):
        assert value.isfinite().all()
        assert far(value, wanted) < 1e-5


def test_a_number_that_all_logits_share_costs_no_digits():
    logits, targets = torch.randn(37, CLASSES, generator=torch.Generator().manual_seed(0)) + 1e5, torch.arange(37)
    wanted = F.cross_entropy(logits.double(), targets, reduction="sum")
    assert far(fused._by_blocks(logits, targets, False, CPU_ROWS), wanted) < 1e-6


def test_a_row_that_does_not_count_may_have_infinite_logits():
    logits, targets = torch.tensor([[-torch.inf, 1.0, 2.0]]).repeat(2, 1), torch.tensor([1, IGNORED])
    wanted = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    assert far(fused._by_blocks(logits, targets, False, CPU_ROWS), wanted) < 1e-6


def test_a_model_that_is_sure_of_itself_has_no_subnormal_gradients():
    """A CPU multiplies subnormal numbers up to eighty times as slowly."""
    x, targets = torch.ones(1, 1), torch.tensor([0])
    weight = -torch.arange(110.0)[:, None].requires_grad_()  # the last probability is exp(-109)
    (gradient,) = torch.autograd.grad(fused_cross_entropy(x, weight, weight.detach(), targets), weight)
    (wanted,) = torch.autograd.grad(plain(x, weight, targets), weight)
    tiny = torch.finfo(torch.float32).tiny
    assert not (gradient.abs() < tiny).any() and (wanted.abs() < tiny).any()
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=2e-30)


def test_inputs_are_left_as_they_were():
    x, weight, targets = problem(37, ignored="some")
    before = x.detach().clone(), weight.detach().clone(), targets.clone()
    loss_and_gradients(fused_cross_entropy, x, weight, weight.detach(), targets)
    assert all(torch.equal(a, b) for a, b in zip((x, weight, targets), before, strict=True))


def test_the_weight_gradient_of_many_rows_of_float16_does_not_overflow():
    """A frequent word's gradient is a sum over its rows, and no loss scale acts before it is taken."""
    rows, value = 4096, 64.0
    x = torch.full((rows, WIDTH), value, dtype=torch.float16, requires_grad=True)
    weight, bias = torch.zeros(CLASSES, WIDTH, requires_grad=True), torch.zeros(CLASSES, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    fused_cross_entropy(x, weight, weight.detach().half(), targets, bias).backward()
    wanted = -rows * (1 - 1 / CLASSES) * value  # -257,000: more than 65,504
    assert weight.grad[0].tolist() == pytest.approx([wanted] * WIDTH, rel=2e-3)
    assert bias.grad[0].item() == pytest.approx(wanted / value, rel=2e-3)
