"""A backward in two parts gives the gradients of a whole one, bit for bit, and accumulates them late."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from models.fused_cross_entropy import fused_cross_entropy
from parallel.zero_bubble.split_backward import backward_inputs, backward_weights

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def residual_blocks():
    model, x = nn.Sequential(Block(), Block()), torch.randn(4, WIDTH, requires_grad=True)
    return model, x, lambda: model(x)


def one_layer_used_three_times():
    layer, block = nn.Linear(WIDTH, WIDTH), Block()
    x = torch.randn(4, WIDTH, requires_grad=True)
    return nn.ModuleList([layer, block]), x, lambda: layer(block(layer(torch.relu(layer(x)))))


def a_custom_function_that_ends_in_a_loss():
    block, head = Block(), nn.Linear(WIDTH, 32)
    x, targets = torch.randn(4, WIDTH, requires_grad=True), torch.tensor([1, 2, 3, 4])

    def loss() -> torch.Tensor:
        return 0.5 * fused_cross_entropy(block(x), head.weight, head.weight.detach(), targets, head.bias)[0]

    return nn.ModuleList([block, head]), x, loss


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    return model, x, lambda: model(x)


def a_weight_beside_the_path():
    block, layer = Block(), nn.Linear(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)
    return nn.ModuleList([block, layer]), x, lambda: layer(block(x)) * block(x) + layer.weight.sum()


CASES = [
    residual_blocks,
    one_layer_used_three_times,
    a_custom_function_that_ends_in_a_loss,
    convolutions,
    a_weight_beside_the_path,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("vectors_early", [False, True], ids=["all weights late", "only matrices late"])
def test_both_parts_together_are_the_whole_backward(case, vectors_early):
    torch.manual_seed(0)
    model, x, run = case()
    weights = list(model.parameters())
    output = run()
    gradients = None if output.dim() == 0 else [torch.randn_like(output)]
    whole = dict(zip([x, *weights], torch.autograd.grad(output, [x, *weights], gradients), strict=True))

    early = [weight for weight in weights if weight.dim() < 2] if vectors_early else []
    late = [weight for weight in weights if all(weight is not other for other in early)]
    output = run()
    found, deferred = backward_inputs([output], gradients, [x, *early], late)
    output.detach_()  # as torch's stage does
    assert all(weight.grad is None for weight in weights)
    backward_weights(deferred)

    for tensor, gradient in zip([x, *early, *late], [*found, *(weight.grad for weight in late)], strict=True):
        assert torch.equal(gradient, whole[tensor])


@pytest.mark.parametrize("case", [c for c in CASES if c is not one_layer_used_three_times], ids=lambda c: c.__name__)
def test_no_product_is_computed_twice(case):
    model, x, run = case()
    vectors, matrices = ([w for w in model.parameters() if (w.dim() < 2) is early] for early in (True, False))

    def products(function, *args):
        with FlopCounterMode(display=False) as counter:
            answer = function(*args)
        return counter.get_total_flops(), answer

    output = run()
    gradients = None if output.dim() == 0 else [torch.ones_like(output)]
    whole, _ = products(torch.autograd.grad, output, [x, *vectors, *matrices], gradients)
    inputs, (_, deferred) = products(backward_inputs, [run()], gradients, [x, *vectors], matrices)
    weights, _ = products(backward_weights, deferred)
    assert inputs + weights == whole


# Outputs of x, a and b, [WIDTH, WIDTH] each. The gradients of some are also those of others.
OUTPUTS = {
    "a sum of two weights": lambda x, a, b: [F.linear(x, a + b)],
    "a weight added at the end": lambda x, a, b: [x.tanh() @ a + b],
    "a weight added at the beginning": lambda x, a, b: [(x + a).tanh() @ b],
    "a weight's sum": lambda x, a, b: [x * a.sum() * b],
    "an output twice": lambda x, a, b: [x @ b, *[a.tanh()] * 2],
    "an output that leads to another": lambda x, a, b: [x @ b, (y := a.tanh()), y @ b],
    "an output that leads to one of the input": lambda x, a, b: [x @ b, (y := a.tanh()), x * y],
}


@pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS.keys())
def test_micro_batches_accumulate_as_in_whole_backwards(outputs):
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2)]
    batches = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]
    given = [[torch.randn(WIDTH, WIDTH) for _ in outputs(batches[0], *weights)] for _ in batches]
    received = [[gradient.clone() for gradient in gradients] for gradients in given]

    for x, gradients in zip(batches, given, strict=True):
        torch.autograd.backward(outputs(x, *weights), gradients)
    whole = [tensor.grad for tensor in (*batches, *weights)]
    for weight in weights:
        weight.grad = None
    parts = [
        backward_inputs(outputs(x, *weights), gradients, [x], weights)
        for x, gradients in zip(batches, received, strict=True)
    ]
    for _, deferred in parts:
        backward_weights(deferred)

    found = [*(gradients[0] for gradients, _ in parts), *(weight.grad for weight in weights)]
    torch.testing.assert_close(found, whole)
    assert all(map(torch.equal, sum(received, []), sum(given, [])))
