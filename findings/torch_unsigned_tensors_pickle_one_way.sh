#!/usr/bin/env bash
# torch 2.13.0: tensors of uint16, uint32, uint64 and float8 can be pickled and cannot be unpickled.
#
# Guess: pickle.loads(pickle.dumps(tensor)) gives the tensor back for each dtype that torch.save can store.
# Seen: it does for uint8, int16 and bfloat16. For the newer dtypes, dumps succeeds, and loads raises an AttributeError.
# torch.save and torch.load work. So a tensor that was sent to another process, or a cached file, fails at the reader.
# Source: torch/_utils.py, _rebuild_tensor_v2, and torch/_tensor.py, _reduce_ex_internal: dtypes without a typed storage
# are stored as an UntypedStorage, and _rebuild_tensor asks it for its dtype.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import io
import pickle

import torch

print("torch", torch.__version__)
seen = {}
for name in ("uint8", "int16", "bfloat16", "uint16", "uint32", "uint64", "float8_e4m3fn"):
    tensor = torch.zeros(2, dtype=getattr(torch, name))
    stored = pickle.dumps(tensor)
    try:
        pickle.loads(stored)
        seen[name] = "comes back"
    except AttributeError as error:
        seen[name] = f"AttributeError: {error}"
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    assert torch.load(file).dtype == tensor.dtype
    print(f"{name}: guess: comes back; pickle: {seen[name]}; torch.save and torch.load: comes back")
failing = {name for name, what in seen.items() if what != "comes back"}
assert failing == {"uint16", "uint32", "uint64", "float8_e4m3fn"}, failing
PROGRAM
venv/bin/python -W ignore finding.py
