#!/usr/bin/env bash
# torch 2.13.0: two settings of the older kind make a getter of the older kind raise for a mix with the newer kind.
#
# Guess: set_float32_matmul_precision("high"), allow_tf32 = False, get_float32_matmul_precision() are one family (the
# older one) and give a string.
# Seen: RuntimeError about a mix of the legacy and the new API, though no setting of the new one was used; on a CPU, too.
# Source: aten/src/ATen/Context.cpp, float32MatmulPrecision: allow_tf32 leaves mkldnn at tf32, and the values disagree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch

print("torch", torch.__version__)
torch.set_float32_matmul_precision("high")
torch.backends.cuda.matmul.allow_tf32 = False
try:
    seen = torch.get_float32_matmul_precision()
except RuntimeError as error:
    seen = f"RuntimeError: {' '.join(str(error).split())[:250]}"
print("guess: a word such as 'highest' or 'high'; seen:", seen)
assert seen.startswith("RuntimeError") and "legacy" in seen
PROGRAM
venv/bin/python -W ignore finding.py
