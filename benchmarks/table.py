"""What a benchmark is, and what it leaves: a CSV file, a JSON file and a picture for each of its tables."""

from __future__ import annotations

import csv
import datetime
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from training.reporting import describe

RESULTS = Path(__file__).parent / "results"
TRIALS = Path(tempfile.gettempdir()) / "benchmarks-quick"  # where runs leave their tables whose numbers mean nothing


@dataclass(frozen=True)
class Table:
    """Results, as they are written into a folder.

    Attributes:
        name: Of the files: NAME.csv, NAME.png, and NAME.json with the date, the hardware, the versions and ``about``.
        rows: All with the same columns. Of an iterator, each is written as soon as it is measured.
        about: What else is to be known of the measurement; fit for JSON.
        draw: Draws all rows into the file that it is given.
    """

    name: str
    rows: Iterable[dict]
    about: Mapping[str, object] = field(default_factory=dict)
    draw: Callable[[Path, list[dict]], None] | None = None

    def write(self, folder: Path) -> None:
        """Print the rows as Markdown, write and draw them."""
        folder.mkdir(parents=True, exist_ok=True)
        path, rows = folder / f"{self.name}.csv", []
        for row in self.rows:
            rows.append(row)
            _save(path, rows)
            if len(rows) == 1:
                _save_facts(path.with_suffix(".json"), self.about)
            if isinstance(self.rows, Iterator):
                print(f"{self.name}:", *row.values(), file=sys.stderr, flush=True)
        if rows:
            print(f"{markdown(rows)}\nwritten to {path}\n", flush=True)
        if self.draw is not None:
            self.draw(path.with_suffix(".png"), rows)
            print(f"figure: {path.with_suffix('.png')}")


@dataclass(frozen=True)
class Benchmark:
    """What ``python -m benchmarks NAME`` runs: the ``BENCHMARK`` of the module, whose docstring is the help page.

    Attributes:
        measure: Yields the tables. It gets the chosen options: ``quick`` (tiny sizes), ``rounds``, ``parts`` (those to
            measure; none: all of them), ``numbers`` and ``output`` (the folder of the tables).
        rounds: The number of rounds if none is chosen; None: it does not repeat itself.
        parts: What can be measured alone.
        one_table: Whether all parts are rows of one table, so that results/ has no table of some parts.
        numbers: Whole numbers that may be chosen, in this order, with their defaults.
    """

    measure: Callable[[Namespace], Iterable[Table]]
    rounds: int | None = None
    parts: Sequence[str] = ()
    one_table: bool = False
    numbers: Mapping[str, int] = field(default_factory=dict)


def _save(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def _save_facts(path: Path, about: Mapping[str, object]) -> None:
    machine = {key: value for key, value in describe().items() if key != "command"}
    facts = {"date": datetime.date.today().isoformat(), **about, "machine": machine}
    path.write_text(json.dumps(facts, indent=1) + "\n")


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of results/NAME.csv."""
    with open(RESULTS / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def markdown(rows: list[dict]) -> str:
    """Return the rows as a Markdown table."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[c]) for c in columns) + " |" for row in rows]
    return "\n".join(lines)
