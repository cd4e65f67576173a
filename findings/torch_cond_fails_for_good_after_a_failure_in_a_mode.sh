#!/usr/bin/env bash
# torch 2.13.0: after torch.cond has failed once in a TorchDispatchMode, it fails outside of the mode, too.
#
# Guess: an error in a mode that watches operators, as a counter of FLOPs does, has no effect after the block.
# Seen: torch.cond compiles itself by dynamo, which keeps what it has failed on. The same call with real tensors, which
# worked in a fresh process, raises until torch._dynamo.reset() is called.
# Source: torch/_higher_order_ops/cond.py compiles cond_op in eager mode; the code of the failed attempt stays marked.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return operator(*args, **(kwargs or {}))


def branch(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def works():
    try:
        branch(torch.ones(2, 3))
        return True
    except Exception as error:
        print("  ", type(error).__name__, str(error).splitlines()[0])
        return False


print("torch", torch.__version__)
try:
    with Watch():
        branch(torch.ones(2, 3))
    print("in the mode: works")
except Exception as error:
    print("in the mode:", type(error).__name__)
print("after the mode: guess: works; seen:")
after = works()
torch._dynamo.reset()
print("after torch._dynamo.reset():", "works" if works() else "fails")
assert not after and works()
PROGRAM
venv/bin/python -W ignore finding.py
