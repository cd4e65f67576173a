#!/usr/bin/env bash
# torch 2.13.0, gloo: collectives on a column of a matrix work on other elements, without an error.
#
# Guess: all_reduce(matrix[:, 0]) adds up the first columns, or raises, as NCCL does ("Tensors must be contiguous").
# Seen: it adds up the first elements in memory, that is, a part of the first row, and the column keeps its values.
# broadcast writes there, too. A transposed matrix, which has no gaps in memory, is right.
# Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp checks the layout ("invalid tensor layout" for sparse tensors)
# and the type, not the strides, and passes data_ptr and numel on.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cd "$folder"
cat > finding.py << 'PROGRAM'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(number, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    matrix = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    dist.all_reduce(matrix[:, 0])
    received = torch.zeros(2, 3) if number == 0 else torch.tensor([[5.0, 0.0, 0.0], [7.0, 0.0, 0.0]])
    dist.broadcast(received[:, 0], src=1)
    if number == 0:
        print("torch", torch.__version__)
        print("all_reduce of the column [1, 4] on two ranks: guess [2, 8]")
        print("seen:", matrix.tolist())
        print("broadcast of the column [5, 7] into zeros: guess [5, 7]")
        print("seen:", received.tolist())
        assert matrix.tolist() == [[2, 4, 3], [4, 5, 6]]
        assert received.tolist() == [[5, 0, 0], [0, 0, 0]]
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (os.getcwd(),), nprocs=2)
PROGRAM
venv/bin/python -W ignore finding.py
