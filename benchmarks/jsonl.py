"""The index of JSON-lines files: rows/s built and read, and memory of a process, for 10^5 to 10^7 rows.

    python -m benchmarks jsonl [--rounds 5] [--quick]

Each size is a file of its own in a temporary folder, about 190 bytes per row. It was written just before and so is in
the page cache: the program is measured, not the disk. Each measurement is a process of its own on one core, in turns;
the table has the median, and in brackets slowest and fastest.

index, rows/s    from the opened file to the index in the cache folder, flushed to disk
random, rows/s   rows.read() of 64 rows each at random places: read, parsed, the text extracted
grown, MiB       what only this process uses (anonymous or written pages) after the reads, and not before; the index and
                 the file are pages of the system's cache, which all share and the system reclaims when it needs them
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.table import Benchmark, Table
from benchmarks.timing import Spread, in_new_process
from data.jsonl import Rows
from data.prompts import RowTokens
from data.vocabulary import GPT2Vocabulary

BATCH = 64
ROWS_AT_ONCE = 100_000
WORDS = "the of and a to in is that it was for on are as with his they at be this from have or by one had not".split()


def measure(chosen: Namespace) -> Iterator[Table]:
    """Yield the table of all sizes."""
    sizes, reads = ((10**3, 10**4), 10**3) if chosen.quick else ((10**5, 10**6, 10**7), 300_000)
    measured: dict[int, list[dict[str, float]]] = {rows: [] for rows in sizes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {rows: generate(folder / f"{rows}.jsonl", rows) for rows in sizes}
        for turn in range(chosen.rounds):
            for rows, path in files.items():
                cache = folder / f"cache-{turn}"
                built = in_new_process(build, path, cache)
                measured[rows].append(built | in_new_process(read, path, cache, reads, turn))
                shutil.rmtree(cache)
        lines = [row_of(rows, path.stat().st_size, measured[rows]) for rows, path in files.items()]
    yield Table("jsonl", lines, {"reads": reads, "repeats": chosen.rounds, "rows a read": BATCH})


def generate(path: Path, rows: int) -> Path:
    """Write a file of ``rows`` rows, each with a number, a source and a text of 8 to 44 common words."""
    random = np.random.default_rng(rows)
    with open(path, "w") as file:
        for first in range(0, rows, ROWS_AT_ONCE):
            # Texts are slices of one line of words: drawing every word would take longer than all measurements.
            line = random.choice(WORDS, 10_000).tolist()
            count = min(ROWS_AT_ONCE, rows - first)
            starts, lengths = random.integers(0, 9_900, count).tolist(), random.integers(8, 45, count).tolist()
            for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                text = " ".join(line[start : start + length])
                file.write(json.dumps({"id": first + i, "source": "benchmark", "text": text + " \u2014 end"}) + "\n")
    return path


def build(path: Path, cache: Path) -> dict[str, float]:
    """Build the index of the file."""
    use_one_core()
    start = time.perf_counter()
    rows = Rows([path], cache)
    return {"index": len(rows) / (time.perf_counter() - start)}


def read(path: Path, cache: Path, reads: int, seed: int) -> dict[str, float]:
    """Read rows at random places through the existing index."""
    use_one_core()
    before = own_memory()
    rows, texts = Rows([path], cache), RowTokens(GPT2Vocabulary(), ["text"])
    batches = np.random.default_rng(seed).integers(0, len(rows), (reads // BATCH, BATCH))
    start = time.perf_counter()
    for indices in batches:
        rows.read(indices, texts)
    return {"random": batches.size / (time.perf_counter() - start), "grown": own_memory() - before}


def use_one_core() -> None:
    """Keep this process on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def own_memory() -> float:
    """Return the MiB that only this process uses and the system cannot reclaim."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return max(int(kib) for kib in re.findall(r"(?:Anonymous|Private_Dirty): +(\d+)", rollup)) / 1024


def row_of(rows: int, size: int, measured: list[dict[str, float]]) -> dict:
    """Return one row of the table."""

    def spread(name: str, digits: int = 0) -> str:
        middle, low, high = (f"{value:,.{digits}f}" for value in Spread.of([one[name] for one in measured]))
        return f"{middle} ({low} to {high})"

    return {
        "rows": f"{rows:,}",
        "bytes a row": f"{size / rows:.0f}",
        "index, rows/s": spread("index"),
        "random, rows/s": spread("random"),
        "grown, MiB": spread("grown", 1),
    }


BENCHMARK = Benchmark(measure, rounds=5)
