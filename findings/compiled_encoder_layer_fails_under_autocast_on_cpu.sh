#!/usr/bin/env bash
# torch 2.13.0 on a CPU: a compiled nn.TransformerEncoderLayer raises in evaluation under autocast, where the eager one
# works.
#
# Guess: a compiled model gives in evaluation what the eager one gives, as it does in training.
# Seen: without gradients, and after a layer whose output autocast has made bfloat16, the eager model works, and the
# compiled one raises "expected m1 and m2 to have the same dtype". With torch.backends.mha.set_fastpath_enabled(False) it
# works.
# Source: torch/nn/modules/transformer.py leaves its fast path out if torch.is_autocast_enabled(), which asks for CUDA. On
# a CPU the layer becomes one operator; the autocast of what this operator calls is lost in the compiled graph.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
from torch import nn

print("torch", torch.__version__)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
x = torch.randn(3, 4, 8)
compiled = torch.compile(net)


def evaluated(model):
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(x)
    except RuntimeError as error:
        return error


eager, found = evaluated(net), evaluated(compiled)
print("guess: both give a tensor; seen:", type(eager).__name__, "and", repr(found))
assert isinstance(eager, torch.Tensor) and "same dtype" in str(found)
torch.backends.mha.set_fastpath_enabled(False)
assert (evaluated(compiled).float() - eager.float()).abs().max() < 0.1
PROGRAM
venv/bin/python -W ignore finding.py
