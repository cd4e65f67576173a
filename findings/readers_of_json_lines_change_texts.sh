#!/usr/bin/env bash
# pandas 3.1.1, datasets 5.2.0, DuckDB 2.0.1: reading lines of JSON turns texts in quotes into numbers, dates and NaN.
#
# Guess: "007" in quotes is a text in JSON, and stays one.
# Seen: pandas' read_json makes numbers of a column of digits, and NaN of "NaN". load_dataset("json") and DuckDB make
# dates of a column in which each text looks like one, DuckDB also times and UUIDs. If one row has another text, all rows
# stay texts: a shard of a data set can have other types than its neighbor. polars keeps them. What turns it off:
# dtype=False; features=Features({"text": Value("string")}); read_json(..., columns={text: 'varchar'}).
# Source: pandas/io/json/_json.py, dtype=True by default; Arrow's reader of JSON, which infers timestamps;
# duckdb/extension/json, read_json_auto.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check pandas==3.1.1 datasets==5.2.0 pyarrow==26.0.1 duckdb==2.0.1
cd "$folder"
cat > finding.py << 'PROGRAM'
import json

import datasets
import duckdb
import pandas
import pyarrow

datasets.disable_progress_bars()
print("pandas", pandas.__version__, "datasets", datasets.__version__, "duckdb", duckdb.__version__)
COLUMNS = {"digits": ["007", "1e5"], "dates": ["2020-01-01", "1999-12-31"], "words": ["NaN", "inf"]}
changed = {}
for name, texts in COLUMNS.items():
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    seen = {
        "pandas": pandas.read_json(f"{name}.jsonl", lines=True)["text"].tolist(),
        "datasets": datasets.load_dataset("json", data_files=f"{name}.jsonl", cache_dir="cache")["train"]["text"][:],
        "duckdb": [text for (text,) in duckdb.sql(f"select text from '{name}.jsonl'").fetchall()],
    }
    for reader, values in seen.items():
        print(f"{reader}: guess: {texts}; seen: {values}")
        changed[reader, name] = values != texts
assert {case for case, is_changed in changed.items() if is_changed} == {
    ("pandas", "digits"), ("pandas", "words"), ("datasets", "dates"), ("duckdb", "dates"),
}
PROGRAM
venv/bin/python -W ignore finding.py
