#!/usr/bin/env bash
# transformers 5.24.0: a causal language model in float64 returns a loss, and a router loss, in float32.
#
# Guess: model.double() computes in float64, its loss included, so that differences of gradients test an implementation
# to about 1e-12.
# Seen: the logits are float64; loss and aux_loss are float32. RMSNorm computes in float32 as well. Two losses that
# differ by less than 1e-7 look equal, and gradients have rounding errors of float32.
# Source: transformers/loss/loss_utils.py (logits.float()), models/mixtral/modeling_mixtral.py
# (load_balancing_loss_func; MixtralRMSNorm converts to torch.float32).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4 transformers==5.24.0
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
import transformers
from torch import nn

print("torch", torch.__version__, "transformers", transformers.__version__)
config = transformers.MixtralConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
)
torch.manual_seed(0)
model = transformers.MixtralForCausalLM(config).double()
try:
    model(input_ids=torch.ones(1, 4, dtype=torch.long))
except RuntimeError as error:
    print("experts in float64, as the library chooses to compute them on a CPU:", str(error).splitlines()[0])
else:
    raise AssertionError("experts in float64 are computed")
model.set_experts_implementation("eager")
tokens = torch.randint(32, (2, 8))
output = model(input_ids=tokens, labels=tokens)
found = [x.dtype for x in (output.logits, output.loss, output.aux_loss)]
print("logits, loss, aux_loss: guess: float64 each; seen:", found)
assert found == [torch.float64, torch.float32, torch.float32]
norm = model.model.layers[0].input_layernorm
x = torch.randn(2, 16, dtype=torch.float64)
off = (norm(x) - nn.functional.rms_norm(x, (16,), norm.weight, norm.variance_epsilon)).abs().max().item()
print(f"RMSNorm beside torch's in float64: guess: 1e-15; seen: {off:.0e}")
assert off > 1e-10
PROGRAM
venv/bin/python -W ignore finding.py
