"""The tables of measurements in the README and in docs/, made from benchmarks/results/*.csv.

    python -m benchmarks.readme

puts each between its two lines, ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks import table

_ROOT = Path(__file__).parents[1]
PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
STRATEGIES = ("model_parallel", "ddp", "pipelined", "pipe_ddp")
_BLOCK = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> None:
    for page in PAGES:
        page.write_text(updated(page.read_text()))


def updated(text: str) -> str:
    """``text`` with all tables as the CSV files have them. Raises KeyError for a name that is not in TABLES."""
    return _BLOCK.sub(lambda found: f"{found[1]}{found[2]}{table.markdown(TABLES[found[1]]())}\n", text)


def parity() -> list[dict]:
    """A row a model: its training in one process, and how far the others were from it, in all their layouts."""
    rows = table.read("parity")
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        runs = {s: [r for r in rows if r["model"] == model and _strategy(r) == s] for s in ("single", *STRATEGIES)}
        (single,) = runs["single"]
        found.append(
            {
                "`model=`": f"`{model}`",
                "steps": f"{single['steps']} in {single['precision']}",
                "loss": f"{single['first loss']} → {single['last loss']}",
                **{f"`{strategy}`": _farthest(runs[strategy]) for strategy in STRATEGIES},
            }
        )
    return found


def schedules() -> list[dict]:
    """A row a layout of GPT-2."""
    rows = [row for row in table.read("parity") if row["model"] == "gpt2" and _strategy(row) != "single"]
    return [
        {
            "`model=gpt2`": " ".join(f"`{word}`" for word in row["run"].split()),
            **{key: row[key] for key in ("loss", "gradient norm", "validation loss")},
        }
        for row in sorted(rows, key=lambda row: STRATEGIES.index(_strategy(row)))
    ]


def jsonl() -> list[dict]:
    """What a user feels of the index; the whole table also has processor time and more of memory."""
    shown = {
        "rows": "rows",
        "index, rows/s": "index built, rows/s",
        "random, rows/s": "rows read at random, rows/s",
        "grown, MiB": "memory, MiB",
    }
    return [{title: row[key] for key, title in shown.items()} for row in table.read("jsonl")]


def pipelining() -> list[dict]:
    """A row a model and way of running, without the fastest and slowest."""
    return [
        {
            "model": row["model"],
            "run": row["run"],
            "chunks": f"{row['chunks']} {row['schedule']}".strip(),
            "layers of each stage": row["split"],
            "seconds a step": row["seconds a step (median)"],
            "samples/s": row["samples/s"],
            "`pipelined` is faster by": row["pipelined is faster by"],
        }
        for row in table.read("pipelining")
    ]


def speed() -> list[dict]:
    """One row per model: how many times as fast ``pipelined`` is as the others."""
    rows = table.read("pipelining")
    others = ("single", "naive", "torchgpipe", "torchgpipe, tuned", "fairscale", "fairscale, tuned")
    factors = {(row["model"], row["run"]): row["pipelined is faster by"] for row in rows}
    models = dict.fromkeys(row["model"] for row in rows)
    return [{"model": model, **{other: factors[model, other] for other in others}} for model in models]


def published_figures() -> list[dict]:
    """A row a bar and a point of the curve, without median, fastest and slowest."""
    shown = ("run", "split size", "mean", "standard deviation", "images/s", "against single")
    return [{key: row[key] for key in shown} for row in table.read("published_figures")]


def faults() -> list[dict]:
    """A row a kind of fault and strategy, without the problems' texts."""
    return [{key: row[key] for key in ("fault", "strategy", "tried", "survived", "steps lost", "bits equal")}
            for row in table.read("faults")]  # fmt: skip


def _strategy(row: dict) -> str:
    return row["run"].split()[0].removeprefix("parallel=")


def _farthest(rows: list[dict]) -> str:
    """The largest differences: of the losses, and of the gradient norms."""
    loss = max(float(row[key]) for row in rows for key in ("loss", "validation loss"))
    norm = max(float(row["gradient norm"]) for row in rows)
    return ", ".join(f"{difference:.0e}" if difference else "0" for difference in (loss, norm))


TABLES: dict[str, Callable[[], list[dict]]] = {
    "parity": parity,
    "schedules": schedules,
    "pipelining": pipelining,
    "speed": speed,
    "published_figures": published_figures,
    "ddp": lambda: table.read("ddp"),
    "overhead_loop": lambda: table.read("overhead_loop"),
    "overhead_start": lambda: table.read("overhead_start"),
    "gpt2": lambda: table.read("gpt2"),
    "jsonl": jsonl,
    "faults": faults,
}

if __name__ == "__main__":
    main()
