#!/usr/bin/env bash
# torchmetrics 1.9.0: metric.sync_on_compute = False has no effect, until forward() is called once.
#
# Guess: the public attribute is what compute() looks at, so that a metric which is counted on one rank only, or whose
# states are summed by the program itself, can be told so after it was built.
# Seen: compute() looks at a copy that was made when the metric was built, and still gathers the states of all ranks: the
# sum is that of both ranks, and where one rank alone calls compute(), it waits forever. Only forward() renews the copy.
# The argument sync_on_compute=False of the constructor works.
# Source: torchmetrics/metric.py, Metric.__init__ (self._to_sync = self.sync_on_compute) and _wrap_compute.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.3.4 torchmetrics==1.9.0
cd "$folder"
cat > finding.py << 'PROGRAM'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchmetrics


def rank(number, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    seen = {}
    for name, options in (("set later", {}), ("in the constructor", {"sync_on_compute": False})):
        metric = torchmetrics.SumMetric(**options)
        metric.sync_on_compute = False
        metric.update(10.0**number)
        seen[name] = metric.compute().item()
    metric = torchmetrics.SumMetric()
    metric.sync_on_compute = False
    metric.forward(10.0**number)
    seen["set later, then forward()"] = metric.compute().item()
    if number == 0:
        print("torch", torch.__version__, "torchmetrics", torchmetrics.__version__)
        print("the sum of rank 0, which counted 1, rank 1 having counted 10: guess: 1.0 each; seen:", seen)
        assert seen == {"set later": 11.0, "in the constructor": 1.0, "set later, then forward()": 1.0}
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (os.getcwd(),), nprocs=2)
PROGRAM
venv/bin/python -W ignore finding.py
