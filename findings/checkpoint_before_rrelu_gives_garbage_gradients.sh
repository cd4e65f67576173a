#!/usr/bin/env bash
# torch 2.13.0: a recomputed block that ends with F.rrelu gets a gradient of uninitialized memory.
#
# Guess: torch.utils.checkpoint(use_reentrant=False) gives the gradient that the block has without it, as for dropout.
# Seen: the output is the same, and the gradient consists of whatever the memory held. rrelu saves its noise for the
# backward before it draws it; recomputation ends as soon as the last tensor is saved (early stop), so nothing is drawn.
# With early_stop=False the gradient is right, or if another operation that saves a tensor follows.
# Source: torch/utils/checkpoint.py, _StopRecomputationError; aten rrelu_with_noise writes into its argument `noise`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def block(x):
    return F.rrelu(x * 1.0, training=True)


def gradient(run):
    x = torch.linspace(-2, 2, 1001).requires_grad_()
    torch.manual_seed(0)
    run(x).sum().backward()
    return x.grad


print("torch", torch.__version__)
right = gradient(block)
recomputed = gradient(lambda x: checkpoint(block, x, use_reentrant=False))
to_the_end = gradient(lambda x: checkpoint(block, x, use_reentrant=False, early_stop=False))
print("without recomputation:", right[:3].tolist())
print("recomputed: guess: the same; seen:", recomputed[:3].tolist())
print("recomputed with early_stop=False:", to_the_end[:3].tolist())
assert torch.equal(to_the_end, right) and not torch.equal(recomputed, right)
PROGRAM
venv/bin/python -W ignore finding.py
