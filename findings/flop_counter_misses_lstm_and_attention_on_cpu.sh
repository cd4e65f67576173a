#!/usr/bin/env bash
# torch 2.13.0 on a CPU: FlopCounterMode counts 0 FLOPs for nn.LSTM, nn.Bilinear and scaled_dot_product_attention.
#
# Guess: as the same counter counts nn.GRU, nn.RNN and nn.Linear, an LSTM of the same sizes has 4/3 of the FLOPs of a GRU.
# Seen: 0, without a word. The LSTM runs as one operator of oneDNN (aten.mkldnn_rnn_layer), the attention as
# aten._scaled_dot_product_flash_attention_for_cpu, nn.Bilinear as aten._trilinear; none has a formula in the registry.
# With torch.backends.mkldnn.flags(enabled=False) the LSTM counts.
# Source: torch/utils/flop_counter.py, flop_registry; operators without an entry count as nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def flops(function, *inputs):
    with FlopCounterMode(display=False) as counter:
        function(*inputs)
    return counter.get_total_flops()


print("torch", torch.__version__)
steps, batch, width, hidden = 5, 3, 16, 32
x = torch.randn(steps, batch, width)
gru = 2 * steps * batch * 3 * hidden * (width + hidden)
seen = flops(nn.GRU(width, hidden), x)
print(f"GRU: by arithmetic {gru}; seen {seen}")
assert seen == gru
lstm, module = gru * 4 // 3, nn.LSTM(width, hidden)
seen = flops(module, x)
with torch.backends.mkldnn.flags(enabled=False):
    without = flops(module, x)
print(f"LSTM: by arithmetic {lstm}; seen {seen}; without oneDNN {without}")
assert seen == 0 and without == lstm
q = torch.randn(1, 2, 8, 16)
seen = flops(F.scaled_dot_product_attention, q, q, q)
print(f"attention: by arithmetic {2 * 2 * 2 * 8 * 8 * 16}; seen {seen}")
assert seen == 0
seen = flops(nn.Bilinear(4, 5, 6), torch.randn(3, 4), torch.randn(3, 5))
print(f"Bilinear: by arithmetic at least {2 * 3 * 4 * 5 * 6}; seen {seen}")
assert seen == 0
PROGRAM
venv/bin/python -W ignore finding.py
