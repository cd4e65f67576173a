#!/usr/bin/env bash
# torchmetrics 1.9.0: MeanSquaredError and MeanAbsoluteError sum errors of float64 in float32, also after double().
#
# Guess: a metric of float64 outputs and targets is a float64 number, or at least after metric.double(), as for modules.
# Seen: the sums of a metric are float32 whatever it is given, and double() changes nothing and does not say so. One
# error of 10,000 and then 10,000 errors of 1, one in each batch, have a mean square of 9999 instead of 10,000: in
# float32, 1e8 + 1 is 1e8. metric.set_dtype(torch.float64) gives the right number, as does mean_squared_error.
# Source: torchmetrics/regression/mse.py (add_state) and torchmetrics/metric.py, Metric.double.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.3.4 \
    torchmetrics==1.9.0
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
from torchmetrics import MeanAbsoluteError, MeanSquaredError, __version__
from torchmetrics.functional import mean_squared_error

print("torch", torch.__version__, "torchmetrics", __version__)
errors = torch.ones(10_001, 1, dtype=torch.float64)
errors[0] = 1e4
zero = torch.zeros(1, dtype=torch.float64)
made = {
    "MeanSquaredError()": MeanSquaredError(),
    "MeanSquaredError().double()": MeanSquaredError().double(),
    "MeanSquaredError().set_dtype(torch.float64)": MeanSquaredError().set_dtype(torch.float64),
}
for error in errors:
    for metric in made.values():
        metric.update(error, zero)
seen = {name: metric.compute() for name, metric in made.items()}
seen["mean_squared_error"] = mean_squared_error(errors, torch.zeros_like(errors))
wanted = errors.square().mean().item()
for name, value in seen.items():
    print(f"{name}: guess: {wanted:.4f}; seen: {value.item():.4f}, {value.dtype}")
right = [abs(value.item() / wanted - 1) < 1e-12 for value in seen.values()]
assert right == [False, False, True, True]
assert abs(seen["MeanSquaredError().double()"].item() - 9999) < 1
absolute = MeanAbsoluteError().double()
absolute.update(errors / 3, torch.zeros_like(errors))
print("MeanAbsoluteError().double():", absolute.compute().dtype)
assert absolute.compute().dtype == torch.float32
PROGRAM
venv/bin/python -W ignore finding.py
