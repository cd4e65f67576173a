"""Rows of numbers as a CSV file and as Markdown, with what they were measured on."""

from __future__ import annotations

import csv
import datetime
import json
import tempfile
from pathlib import Path

from training.reporting import describe

RESULTS = Path(__file__).parent / "results"


def write(name: str, rows: list[dict], quick: bool = False, **about) -> Path:
    """results/NAME.csv with the rows and results/NAME.json with date, hardware, versions and ``about``.

    quick  a trial run, whose numbers mean nothing: a folder for temporary files takes its table
    """
    folder = Path(tempfile.gettempdir()) / "benchmarks-quick" if quick else RESULTS
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    machine = {key: value for key, value in describe().items() if key != "command"}
    facts = {"date": datetime.date.today().isoformat(), **about, "machine": machine}
    path.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    return path


def read(name: str) -> list[dict[str, str]]:
    """The rows of results/NAME.csv."""
    with open(RESULTS / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def facts(name: str) -> dict:
    """What results/NAME.json says of the rows."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(rows: list[dict]) -> str:
    """The rows as a table for a README."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[c]) for c in columns) + " |" for row in rows]
    return "\n".join(lines)
