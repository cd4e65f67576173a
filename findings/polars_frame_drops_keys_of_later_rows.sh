#!/usr/bin/env bash
# polars 2.1.0: DataFrame({"calls": rows}) drops the keys of objects that the first row does not have; read_ndjson drops
# the columns that the first 100 rows do not have.
#
# Guess: a struct gets the fields of all rows, with null where a row has none, as from_dicts and pyarrow do; or a row with
# another key is an error, as a row of another type is. infer_schema_length=None looks at all rows.
# Seen: the fields are those of the first row. The values of other keys are gone without a word, also with
# infer_schema_length=None, so that a Parquet file of chats loses the arguments of all calls but the first one's. From
# lines of JSON, a column that begins after row 100 is gone, unless infer_schema_length=None is set.
# Source: polars-core, the constructor of a series from Python objects takes the dtype of the first value;
# polars-io/ndjson, infer_file_schema, 100 rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check polars==2.1.0
cd "$folder"
cat > finding.py << 'PROGRAM'
import polars

print("polars", polars.__version__)
rows = [[{"arguments": {"city": "Rome"}}], [{"arguments": {"a": 3, "b": 4}}]]
seen = polars.DataFrame({"calls": rows})["calls"].to_list()
print("the second row: guess:", rows[1], "with nulls, or an error; seen:", seen[1])
assert seen[1] == [{"arguments": {"city": None}}]
assert polars.DataFrame({"calls": rows}, infer_schema_length=None)["calls"].to_list() == seen
kept = polars.from_dicts([{"calls": row} for row in rows])["calls"].to_list()
print("from_dicts:", kept[1])
assert kept[1] == [{"arguments": {"city": None, "a": 3, "b": 4}}]

lines = b'{"text": "a"}\n' * 100 + b'{"text": "b", "answer": "c"}\n'
late = polars.read_ndjson(lines).columns
print("columns of lines of JSON: guess: text, answer; seen:", late)
assert late == ["text"]
assert polars.read_ndjson(lines, infer_schema_length=None).columns == ["text", "answer"]
PROGRAM
venv/bin/python -W ignore finding.py
