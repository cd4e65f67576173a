#!/usr/bin/env bash
# pandas 3.1.1: to_json keeps ten decimal places, and read_json changes a quarter of the numbers that json.dumps writes.
#
# Guess: json.dumps writes a float64 so that it is read back exactly, and pandas reads and writes JSON as exactly: polars,
# DuckDB, datasets and pandas' own read_csv do.
# Seen: to_json writes a learning rate of 1.23456789e-8 as 1.23e-8, and 1e-11 as 0.0: double_precision=10 counts decimal
# places, not digits. read_json of lines is off by up to 1e-11 relative, far more than the last bit, unless
# precise_float=True or engine="pyarrow" is set. Two histories that are equal bit by bit can so differ in their frames.
# Source: pandas/_libs/src/vendored/ujson, which sums up decimal digits in its decoder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pandas==3.1.1 polars==2.1.0
cd "$folder"
cat > finding.py << 'PROGRAM'
import json
import random

import pandas
import polars

print("pandas", pandas.__version__, "polars", polars.__version__)
random.seed(0)
losses = [random.uniform(0, 12) for _ in range(10_000)]
with open("history.jsonl", "w") as file:
    file.writelines(json.dumps({"loss": loss}) + "\n" for loss in losses)


def changed(numbers):
    off = [abs(seen - loss) / loss for seen, loss in zip(numbers, losses, strict=True)]
    return sum(map(bool, off)), max(off)


seen, by_polars = changed(pandas.read_json("history.jsonl", lines=True)["loss"]), polars.read_ndjson("history.jsonl")
print(f"read_json: guess: 0 of 10000 numbers change; seen: {seen[0]}, by up to {seen[1]:.1e} relative")
assert seen[0] > 1000 and 1e-13 < seen[1] < 1e-9
assert changed(by_polars["loss"])[0] == 0
assert changed(pandas.read_json("history.jsonl", lines=True, precise_float=True)["loss"])[0] == 0

rates = [1.23456789e-8, 1e-11]
written = [json.loads(line)["lr"] for line in pandas.DataFrame({"lr": rates}).to_json(orient="records", lines=True).split()]
print("to_json: guess:", rates, "; seen:", written)
assert written == [1.23e-8, 0.0]
PROGRAM
venv/bin/python -W ignore finding.py
