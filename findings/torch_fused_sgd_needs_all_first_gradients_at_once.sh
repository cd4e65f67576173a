#!/usr/bin/env bash
# torch 2.13.0: fused SGD with momentum raises TypeError when a parameter gets its first gradient later than another one.
#
# Guess: fused=True computes what foreach=True and the plain loop compute, only faster. A layer that is unfrozen after
# some steps is an ordinary parameter group to both.
# Seen: the plain and the foreach optimizer give the late parameter a new momentum buffer. The fused one passes a list
# with None to its kernel, and the step raises TypeError. Adam and AdamW, fused too, take the late parameter.
# Source: torch/optim/sgd.py, _fused_sgd: is_first_step is true only if all momentum buffers of a device and dtype are
# None; otherwise the list goes to torch._fused_sgd_ as it is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch

print("torch", torch.__version__)


def two_steps(kind, **options):
    early, late = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = kind([early, late], lr=0.1, **options)
    early.grad = torch.ones(2)
    optimizer.step()
    late.grad = torch.ones(2)
    optimizer.step()
    return late.tolist()


momentum = {"kind": torch.optim.SGD, "momentum": 0.9}
plain, foreach = two_steps(**momentum, foreach=False), two_steps(**momentum, foreach=True)
adam = two_steps(torch.optim.Adam, fused=True)
print("the late parameter after its first step: plain SGD", plain, "foreach", foreach, "fused Adam", adam)
assert plain == foreach and adam != [1.0, 1.0]
try:
    seen = two_steps(**momentum, fused=True)
except TypeError as error:
    print("fused SGD: guess:", plain, "; seen: TypeError:", error)
else:
    raise AssertionError(f"fused SGD updates the late parameter: {seen}")
PROGRAM
venv/bin/python -W ignore finding.py
