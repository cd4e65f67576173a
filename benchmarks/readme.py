"""The tables of measurements in the README and in docs/, made from benchmarks/results/*.csv.

    python -m benchmarks readme

puts each between its two lines, ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks import table
from training.studies.verification.layouts import COMPARED

# The measured runs of parallel=pipelined, one for each schedule.
SCHEDULES = (
    "pipelined_gpipe", "pipelined_1f1b", "pipelined_interleaved_1f1b", "pipelined_looped_bfs",
    "pipelined_interleaved_zero_bubble", "pipelined_planned",
)  # fmt: skip
_ROOT = Path(__file__).parents[1]
PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def update(chosen: Namespace) -> Iterable[table.Table]:
    """Update README.md and the pages in docs/."""
    for page in PAGES:
        page.write_text(updated(page.read_text()))
    return ()


def updated(text: str) -> str:
    """Return ``text`` with the tables as in the CSV files.

    Raises:
        FileNotFoundError: If the text has a table that results/ does not have.
    """
    return _BLOCK.sub(lambda match: f"{match[1]}{match[2]}{table.markdown(rows_of(match[1]))}\n", text)


def rows_of(name: str) -> list[dict]:
    """Return the rows of a table as the pages show it."""
    shown = SHOWN.get(name)
    if callable(shown):
        return shown()
    rows = table.read(name)
    shown = shown or {column: column for column in rows[0]}
    return [{title: _cell(row, columns) for title, columns in shown.items()} for row in rows]


def _cell(row: Mapping[str, str], columns: str | tuple[str, ...]) -> str:
    return row[columns] if isinstance(columns, str) else " ".join(row[column] for column in columns).strip()


def parity() -> list[dict]:
    """Return one row per model: of how many layouts, and the largest difference of all that is compared by strategy."""
    found: dict[str, dict[str, list[float]]] = {}
    rows = table.read("parity")
    for row in rows:
        sizes = [float(size) for kind, size in row.items() if kind in COMPARED]
        strategy = row["run"].split()[0].removeprefix("parallel=")
        found.setdefault(row["model"], {}).setdefault(strategy, []).append(max(sizes))
    return [
        {"`model=`": f"`{model}`", "layouts": str(sum(row["model"] == model for row in rows) - 1)}
        | {f"`{strategy}`": f"{max(sizes):.0e}" if any(sizes) else "0" for strategy, sizes in by_strategy.items()}
        for model, by_strategy in found.items()
    ]


def parity_of(name: str) -> list[dict]:
    """Return one row per layout in which ranks share something: the largest difference of each model."""
    found: dict[str, dict[str, str]] = {}
    rows = table.read(name)
    models = dict.fromkeys((f"`{row['model']}`" for row in rows), "")
    for row in rows:
        largest = max(float(size) for kind, size in row.items() if kind in COMPARED)
        found.setdefault(row["run"], {**models})[f"`{row['model']}`"] = f"{largest:.0e}" if largest else "0"
    return [{"layout": f"`{layout}`", **sizes} for layout, sizes in found.items()]


def architectures() -> list[dict]:
    """Return one row per architecture: layouts, the largest difference, why not all of them, and how fast it is."""
    seconds = {row["architecture"]: row for row in table.read("architectures_speed")}
    shown = ("the chain takes", "model=llama or gpt2 takes")
    return [
        {"architecture": f"`{row['architecture']}`"}
        | {column: row[column] for column in ("layouts", "largest difference")}
        | {column: seconds.get(row["architecture"], {}).get(column, "") for column in shown}
        | {"why not": row["why not"]}
        for row in table.read("architectures")
    ]


def speed() -> list[dict]:
    """Return one row per model: how many times as fast ``pipelined`` is as the others."""
    rows = table.read("pipelining")
    peers = ("torchgpipe", "torchgpipe, tuned", "fairscale", "fairscale, tuned")
    others = ("single", "single, 2 threads", "naive", *peers)
    factors = {(row["model"], row["run"]): row["pipelined is faster by"] for row in rows}
    models = dict.fromkeys(row["model"] for row in rows)
    return [{"model": model, **{other: factors[model, other] for other in others}} for model in models]


def strategies() -> list[dict]:
    """Return one row per strategy: what its fullest rank holds, and the most that a rank sends."""
    by_name: dict[str, list[dict[str, str]]] = {}
    for row in table.read("strategies"):
        by_name.setdefault(row["strategy"], []).append(row)
    shown = {**_HELD, "sent": "sent"}
    return [
        {"strategy": f"`{name}`", "processes": str(len(rows))}
        | {f"{title}, MB": _megabytes(max(int(row[column]) for row in rows)) for title, column in shown.items()}
        for name, rows in by_name.items()
    ]


def of_strategy(names: Sequence[str], named: bool = False) -> list[dict]:
    """Return one row per rank of some measured strategies: what it holds, and what it sends in a step."""
    rows = [row for row in table.read("strategies") if row["strategy"] in names]
    held = {title: key for title, key in _HELD.items() if any(int(row[key]) for row in rows)}
    return [
        ({"schedule": f"`{row['strategy'].removeprefix('pipelined_')}`"} if named else {})
        | {"rank": row["rank"]}
        | {f"{title}, MB": _megabytes(int(row[key])) for title, key in held.items()}
        | {"sent, bytes": f"{int(row['sent']):,}", "by formula": f"{int(row['sent by formula']):,}"}
        for row in rows
    ]


_HELD = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "whole at once": "whole",
    "activations": "activations",
}  # fmt: skip


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"


def _same(*columns: str) -> dict[str, str]:
    return {column: column for column in columns}


# What a page shows of results/NAME.csv, if not all of it: for each title the column or columns, or what makes the rows.
SHOWN: dict[str, Mapping[str, str | tuple[str, ...]] | Callable[[], list[dict]]] = {
    "parity": parity,
    **{name: partial(parity_of, name) for name in ("parity_tensor", "parity_context", "parity_experts")},
    "architectures": architectures,
    "pipelining": {
        **_same("model", "run"),
        "chunks": ("chunks", "schedule"),
        "layers of each stage": "split",
        "seconds a step": "seconds a step (median)",
        "samples/s": "samples/s",
        "`pipelined` is faster by": "pipelined is faster by",
    },
    "speed": speed,
    "published_figures": _same("run", "split size", "mean", "standard deviation", "images/s", "against single"),
    "jsonl": {
        "rows": "rows",
        "index built, rows/s": "index, rows/s",
        "rows read at random, rows/s": "random, rows/s",
        "memory, MiB": "grown, MiB",
    },
    "context": {
        "run": "run",
        "seconds a step": "seconds a step (median)",
        **_same("times one process", "MiB of activations", "times those of one process"),
        **_same("MiB that a layer sends", "by formula"),
    },
    "experts": {
        "run": "run",
        "seconds a step": "seconds a step (median)",
        **_same("times one process", "MiB of state", "times that of one process"),
        **_same("MiB that a layer sends", "by formula"),
    },
    "faults": _same("fault", "strategy", "tried", "survived", "steps lost", "bits equal"),
    "strategies": strategies,
    **{
        f"strategy_{name}": partial(of_strategy, (name,))
        for name in ("single", "model_parallel", "ddp", "fsdp", "hsdp", "pipe_ddp", "pipe_fsdp", "tensor", "sequence")
    },
    "strategy_pipelined": partial(of_strategy, SCHEDULES, named=True),
}
BENCHMARK = table.Benchmark(update)
