#!/usr/bin/env bash
# torch 2.13.0 on a CPU: with one seed, dropout drops other elements of a transposed tensor than of its contiguous copy.
#
# Guess: F.dropout with a seed is a function of the values and the shape of its input.
# Seen: the mask is drawn in the order of memory (it is made by empty_like, which keeps strides). Whoever adds a
# .contiguous(), or compares a model with a copy that lays out its tensors otherwise, gets another mask.
# Source: aten/src/ATen/native/Dropout.cpp, native_dropout_cpu: at::empty_like(input), then bernoulli_.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
import torch.nn.functional as F


def dropped(x):
    torch.manual_seed(0)
    return F.dropout(x, 0.5)


print("torch", torch.__version__)
ones = torch.ones(4, 6).t()
strided, contiguous = dropped(ones), dropped(ones.contiguous())
print("guess: equal; seen:", "equal" if torch.equal(strided, contiguous) else "different masks")
assert not torch.equal(strided, contiguous)
# In the order of memory, both have drawn the same numbers.
assert torch.equal(strided.t().flatten(), contiguous.flatten())
PROGRAM
venv/bin/python -W ignore finding.py
