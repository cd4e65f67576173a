#!/usr/bin/env bash
# torch 2.13.0: autocast does not cast tensors on the meta device, and there is no autocast for that device.
#
# Guess: a forward on the meta device under torch.autocast("cpu", torch.bfloat16) infers the dtypes of the real forward,
# as it infers the shapes; or torch.autocast("meta") does.
# Seen: a product of meta tensors stays float32, where the real one is bfloat16. torch.autocast("meta") raises
# RuntimeError. Memory or messages between stages that are computed from such a forward are twice too large. A fake
# tensor (FakeTensorMode), which says that it is on the CPU, is cast.
# Source: the dispatch key of autocast is chosen by a tensor's device (c10/core/DispatchKeySet), and meta has none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def dtype_of_a_forward(device):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.nn.Linear(4, 4, device=device)(torch.ones(2, 4, device=device)).dtype


print("torch", torch.__version__)
real, meta = dtype_of_a_forward("cpu"), dtype_of_a_forward("meta")
with FakeTensorMode():
    fake = dtype_of_a_forward("cpu")
print(f"real: {real}; meta: guess: the same; seen: {meta}; fake: {fake}")
assert (real, meta, fake) == (torch.bfloat16, torch.float32, torch.bfloat16)
try:
    torch.autocast("meta", dtype=torch.bfloat16)
except RuntimeError as error:
    print("autocast for meta: guess: it exists; seen:", error)
else:
    raise AssertionError("torch.autocast('meta') exists")
PROGRAM
venv/bin/python -W ignore finding.py
