#!/usr/bin/env bash
# torchmetrics 1.9.0: AUROC and average precision raise IndexError if all targets are ignored.
#
# Guess: with ignore_index, targets that are all ignored give nan, or 0.0 with a warning, as targets of one class alone
# and accuracy do: labels of a rare task can be missing in a whole validation split.
# Seen: compute() ends with "IndexError: index is out of bounds for dimension with size 0", of binary, multiclass and
# multilabel targets. With thresholds=10, the AUROC of the same targets is 0.0.
# Source: torchmetrics/functional/classification/precision_recall_curve.py, _binary_clf_curve.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.3.4 \
    torchmetrics==1.9.0
cd "$folder"
cat > finding.py << 'PROGRAM'
import torch
import torchmetrics
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision
from torchmetrics.classification import MulticlassAUROC, MultilabelAUROC

print("torch", torch.__version__, "torchmetrics", torchmetrics.__version__)


def result(metric, outputs, targets):
    metric.update(outputs, targets)
    try:
        return metric.compute().item()
    except IndexError as error:
        return f"IndexError: {error}"


ignored, outputs = torch.full((4,), -100), torch.tensor([0.1, 0.4, 0.6, 0.9])
classes = torch.eye(4)[:, :3]
of_all = [
    result(BinaryAUROC(ignore_index=-100), outputs, ignored),
    result(BinaryAveragePrecision(ignore_index=-100), outputs, ignored),
    result(MulticlassAUROC(num_classes=3, ignore_index=-100), classes, ignored),
    result(MultilabelAUROC(num_labels=3, ignore_index=-100), classes, ignored[:, None].expand(4, 3)),
]
print("four targets, all ignored: guess: nan or 0.0; seen:", of_all)
assert all(str(one).startswith("IndexError") for one in of_all)
others = {
    "accuracy": result(BinaryAccuracy(ignore_index=-100), outputs, ignored),
    "AUROC with thresholds=10": result(BinaryAUROC(ignore_index=-100, thresholds=10), outputs, ignored),
    "AUROC of one class alone": result(BinaryAUROC(ignore_index=-100), outputs, torch.ones(4, dtype=torch.int64)),
}
print("beside:", others)
assert set(others.values()) == {0.0}
PROGRAM
venv/bin/python -W ignore finding.py
