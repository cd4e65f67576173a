#!/usr/bin/env bash
# torch 2.13.0 on a CPU: matrix_exp of bfloat16 and float16 matrices returns finite numbers that mean nothing.
#
# Guess: torch.matrix_exp of a rotation by one radian is about [[0.54, 0.84], [-0.84, 0.54]] in each dtype, or an error.
# Seen: float32 is right. bfloat16 gives entries around -1e30, float16 around -2e4: finite, so that no check for NaN
# finds them. Under autocast, matrices that a linear layer has made are bfloat16.
# Source: aten/src/ATen/native/LinearAlgebra.cpp, mexp_impl: the thresholds that choose the degree and the coefficients
# are made for float and double only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch

print("torch", torch.__version__)
rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
right = torch.matrix_exp(rotation)
print("float32:", right.tolist())
assert torch.allclose(right, torch.tensor([[0.5403, 0.8415], [-0.8415, 0.5403]]), atol=1e-3)
for dtype, size in ((torch.bfloat16, 1e20), (torch.float16, 1e3)):
    seen = torch.matrix_exp(rotation.to(dtype))
    print(f"{dtype}: guess: the same to two digits; seen: {seen.tolist()}")
    assert seen.isfinite().all() and seen.abs().max() > size
PROGRAM
venv/bin/python -W ignore finding.py
