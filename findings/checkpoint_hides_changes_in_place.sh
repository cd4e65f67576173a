#!/usr/bin/env bash
# torch 2.13.0: in a recomputed block, a change in place of a tensor that the backward needs is no error, but a wrong
# gradient.
#
# Guess: torch.utils.checkpoint(use_reentrant=False) ends in the error that the block has without it, "one of the
# variables needed for gradient computation has been modified by an inplace operation", or its gradient is right.
# Seen: no error. The square's backward gets the tensor as it is after the change, so the gradient is that of another
# function. Autograd compares versions of tensors when it unpacks them; the recomputation hands over detached tensors
# without comparing.
# Source: torch/utils/checkpoint.py, the hooks of _recomputation_hook and _checkpoint_hook.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
from torch.utils.checkpoint import checkpoint


def in_place(x):
    hidden = 2 * x
    square = hidden * hidden
    hidden.add_(1)
    return square + hidden.sin()


def out_of_place(x):
    hidden = 2 * x
    return hidden * hidden + (hidden + 1).sin()


def gradient(run):
    x = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
    run(x).sum().backward()
    return x.grad


print("torch", torch.__version__)
try:
    gradient(in_place)
    raise SystemExit("no error without recomputation")
except RuntimeError as error:
    print("without recomputation:", str(error).partition(":")[0])
right, seen = gradient(out_of_place), gradient(lambda x: checkpoint(in_place, x, use_reentrant=False))
print("right gradient:", [round(value, 3) for value in right.tolist()])
print("recomputed: guess: the same error, or this gradient; seen:", [round(value, 3) for value in seen.tolist()])
assert (seen - right).abs().max() > 1
PROGRAM
venv/bin/python -W ignore finding.py
