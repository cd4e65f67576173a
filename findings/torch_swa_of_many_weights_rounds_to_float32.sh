#!/usr/bin/env bash
# torch 2.13.0: AveragedModel with get_swa_multi_avg_fn averages float64 weights with factors in float32.
#
# Guess: the multi function is the fast form of the default one, and both give the mean of the weights to 1e-16 in
# float64.
# Seen: the default function is exact to 1e-16. The multi function is off by 1e-9, for any float64 model.
# Source: torch/optim/swa_utils.py. AveragedModel passes the number of averaged models as an int64 tensor, and
# get_swa_multi_avg_fn computes 1 / (number + 1): of whole numbers in a tensor, torch returns its default dtype, float32.
# Given a Python int, the same function is exact.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn

print("torch", torch.__version__)
VALUES = [0.1, 0.7, 0.3]


def off(**options):
    model = torch.nn.Linear(1, 1, bias=False).double()
    average = AveragedModel(model, **options)
    for value in VALUES:
        torch.nn.init.constant_(model.weight, value)
        average.update_parameters(model)
    return abs(average.module.weight.item() - sum(VALUES) / len(VALUES))


print(f"the default function: guess: 1e-16; seen: {off():.0e}")
assert off() < 1e-15
seen = off(multi_avg_fn=get_swa_multi_avg_fn())
print(f"get_swa_multi_avg_fn: guess: 1e-16; seen: {seen:.0e}")
assert 1e-11 < seen < 1e-7
mean, rule = [torch.tensor([VALUES[0]], dtype=torch.float64)], get_swa_multi_avg_fn()
for number, value in enumerate(VALUES[1:], start=1):
    rule(mean, [torch.tensor([value], dtype=torch.float64)], number)
print(f"the same function with a Python int: {abs(mean[0].item() - sum(VALUES) / len(VALUES)):.0e}")
assert abs(mean[0].item() - sum(VALUES) / len(VALUES)) < 1e-15
PROGRAM
venv/bin/python -W ignore finding.py
