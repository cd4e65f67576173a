"""What all benchmarks share around their measurements: CSV files and Markdown tables."""

from __future__ import annotations

import csv
import datetime
import json
import tempfile
from pathlib import Path

from training.reporting import describe

RESULTS = Path(__file__).parent / "results"
QUICK = {"--quick --dry-run": {"action": "store_true", "help": "tiny sizes, to check that it runs"}}


def write(name: str, rows: list[dict], quick: bool = False, **about) -> Path:
    """Print the rows as Markdown and writes them to results/NAME.csv.

    results/NAME.json gets the date, the hardware, the versions and ``about``.

    Args:
        name: The table's name.
        rows: At least one row; all have the same columns.
        quick: Whether this is a trial run, whose numbers mean nothing; its files go to a temporary directory.
        **about: What else is to be known of the measurement; fit for JSON.

    Returns:
        The path of the CSV file.
    """
    print(markdown(rows))
    path = folder_of(quick) / f"{name}.csv"
    save(path, rows, **about)
    print(f"written to {path}\n")
    return path


def folder_of(quick: bool) -> Path:
    """Return where tables are written: the results, or a temporary directory for those of a trial run."""
    return Path(tempfile.gettempdir()) / "benchmarks-quick" if quick else RESULTS


def save(path: Path, rows: list[dict], **about) -> None:
    """Write the rows to ``path``, and date, hardware, versions and ``about`` to the JSON file beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    machine = {key: value for key, value in describe().items() if key != "command"}
    about = {"date": datetime.date.today().isoformat(), **about, "machine": machine}
    path.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of results/NAME.csv."""
    with open(RESULTS / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def facts(name: str) -> dict:
    """Return the contents of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(rows: list[dict]) -> str:
    """Return the rows as a Markdown table."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[c]) for c in columns) + " |" for row in rows]
    return "\n".join(lines)
