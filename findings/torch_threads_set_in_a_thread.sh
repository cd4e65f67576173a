#!/usr/bin/env bash
# torch 2.13.0: torch.set_num_threads in one thread also counts in each thread that has not computed yet, even if that
# thread has set its own number.
#
# Guess: the setting is that thread's own, as a comment in DataLoader's pin_memory thread says, which sets 1; or it is
# the process's.
# Seen: neither. The main thread, which has set 4 before, and a later thread have 1; a thread that has asked before
# keeps 4.
# Source: aten/src/ATen/ParallelOpenMP.cpp: the last number is the process's, and each thread takes it at its first
# use, in place of its own; torch/utils/data/_utils/pin_memory.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
from concurrent.futures import ThreadPoolExecutor

import torch

print("torch", torch.__version__)
torch.set_num_threads(4)
with ThreadPoolExecutor(1) as earlier, ThreadPoolExecutor(1) as setter, ThreadPoolExecutor(1) as later:
    asked = earlier.submit(torch.get_num_threads).result()
    setter.submit(torch.set_num_threads, 1).result()
    seen = [asked, torch.get_num_threads(), *(pool.submit(torch.get_num_threads).result() for pool in (earlier, later))]
print("an earlier thread, then the main one, the earlier one and a later one after another thread has set 1")
print("guess: [4, 4, 4, 4] or [4, 1, 1, 1]; seen:", seen)
assert seen == [4, 1, 4, 1]
PROGRAM
venv/bin/python finding.py
