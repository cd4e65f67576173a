"""The tables of measurements in the README and in docs/, made from benchmarks/results/*.csv.

    python -m benchmarks readme

puts each between its two lines, ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import table

_ROOT = Path(__file__).parents[1]
PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


OPTIONS: dict[str, dict] = {}


def main(chosen: Namespace) -> None:
    """Update README.md and the pages in docs/."""
    for page in PAGES:
        page.write_text(updated(page.read_text()))


def updated(text: str) -> str:
    """Return ``text`` with the tables as in the CSV files.

    Raises:
        KeyError: If the text has a table that is not in ``TABLES``.
    """
    return _BLOCK.sub(lambda match: f"{match[1]}{match[2]}{table.markdown(TABLES[match[1]]())}\n", text)


def parity() -> list[dict]:
    """Return one row per model: its training in one process, and the largest differences under each strategy."""
    runs: dict[str, dict[str, list[dict]]] = {}
    for row in table.read("parity"):
        runs.setdefault(row["model"], {}).setdefault(_strategy(row), []).append(row)
    rows = []
    for model, by_strategy in runs.items():
        (single,) = by_strategy.pop("single")
        row = {"`model=`": f"`{model}`", "steps": f"{single['steps']} in {single['precision']}"}
        row["loss"] = f"{single['first loss']} → {single['last loss']}"
        rows.append(row | {f"`{strategy}`": _largest(found) for strategy, found in by_strategy.items()})
    return rows


def schedules() -> list[dict]:
    """Return one row per layout of GPT-2."""
    rows = [row for row in table.read("parity") if row["model"] == "gpt2" and _strategy(row) != "single"]
    strategies = list(dict.fromkeys(map(_strategy, rows)))
    return [
        {
            "`model=gpt2`": " ".join(f"`{word}`" for word in row["run"].split()),
            **{key: row[key] for key in ("loss", "gradient norm", "validation loss")},
        }
        for row in sorted(rows, key=lambda row: strategies.index(_strategy(row)))
    ]


def speed() -> list[dict]:
    """Return one row per model: how many times as fast ``pipelined`` is as the others."""
    rows = table.read("pipelining")
    peers = ("torchgpipe", "torchgpipe, tuned", "fairscale", "fairscale, tuned")
    others = ("single", "single, 2 threads", "naive", *peers)
    factors = {(row["model"], row["run"]): row["pipelined is faster by"] for row in rows}
    models = dict.fromkeys(row["model"] for row in rows)
    return [{"model": model, **{other: factors[model, other] for other in others}} for model in models]


def some_columns(name: str, *columns: str, **titles: str | tuple[str, ...]) -> list[dict]:
    """Return the rows of a table with some of its columns; ``titles``: the column, or several, of each new title."""
    shown = {column: (column,) for column in columns}
    shown |= {title: (of,) if isinstance(of, str) else of for title, of in titles.items()}
    return [{title: " ".join(row[c] for c in of).strip() for title, of in shown.items()} for row in table.read(name)]


def _strategy(row: dict) -> str:
    return row["run"].split()[0].removeprefix("parallel=")


def _largest(rows: list[dict]) -> str:
    """The largest differences: of the losses, and of the gradient norms."""
    loss = max(float(row[key]) for row in rows for key in ("loss", "validation loss"))
    norm = max(float(row["gradient norm"]) for row in rows)
    return ", ".join(f"{difference:.0e}" if difference else "0" for difference in (loss, norm))


_PIPELINING = {
    "chunks": ("chunks", "schedule"),
    "layers of each stage": "split",
    "seconds a step": "seconds a step (median)",
    "samples/s": "samples/s",
    "`pipelined` is faster by": "pipelined is faster by",
}
_JSONL = {
    "rows": "rows",
    "index built, rows/s": "index, rows/s",
    "rows read at random, rows/s": "random, rows/s",
    "memory, MiB": "grown, MiB",
}
TABLES: dict[str, Callable[[], list[dict]]] = {
    "parity": parity,
    "schedules": schedules,
    "pipelining": partial(some_columns, "pipelining", "model", "run", **_PIPELINING),
    "speed": speed,
    "published_figures": partial(
        some_columns, "published_figures",
        "run", "split size", "mean", "standard deviation", "images/s", "against single",
    ),
    "jsonl": partial(some_columns, "jsonl", **_JSONL),
    "faults": partial(
        some_columns, "faults", "fault", "strategy", "tried", "survived", "steps lost", "bits equal"
    ),
    **{
        name: partial(table.read, name)
        for name in ("first_run", "ddp", "overhead_loop", "overhead_start", "gpt2", "exporting", "sampling")
    },
}  # fmt: skip
