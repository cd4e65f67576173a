#!/usr/bin/env bash
# torch 2.13.0: a backward marked once_differentiable gives a gradient penalty a wrong gradient, without an error.
#
# Guess: create_graph=True through a function whose backward is @once_differentiable raises an error as soon as the
# gradient is differentiated, as the decorator's purpose says.
# Seen: the error is only raised if the INCOMING gradient requires a gradient. In the usual case, the gradient of a loss,
# it is a constant. The result is then detached, although it depends on the saved input. A penalty on the gradient adds
# nothing for this path: for x^2 at 3, the derivative of (gradient x x) is 6; 12 is right.
# Source: torch/autograd/function.py, once_differentiable: requires_grad looks at the arguments of backward only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
from torch.autograd.function import once_differentiable


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def derivative_of_gradient_times_input(square):
    x = torch.tensor(3.0, requires_grad=True)
    (gradient,) = torch.autograd.grad(square(x), x, create_graph=True)
    (gradient * x).backward()
    return x.grad.item()


print("torch", torch.__version__)
right, seen = derivative_of_gradient_times_input(torch.square), derivative_of_gradient_times_input(Square.apply)
print(f"right: {right}; guess: an error; seen: {seen}")
assert (right, seen) == (12.0, 6.0)

x = torch.tensor(3.0, requires_grad=True)
factor = torch.tensor(1.0, requires_grad=True)  # the incoming gradient depends on it
(gradient,) = torch.autograd.grad(Square.apply(x) * factor, x, create_graph=True)
try:
    gradient.backward()
except RuntimeError as error:
    print("with an incoming gradient that requires one:", str(error).splitlines()[0])
else:
    raise AssertionError("no error")
PROGRAM
venv/bin/python -W ignore finding.py
