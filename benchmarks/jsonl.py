"""The index of JSON-lines files: rows a second built and read, and memory of a process, from 10^5 to 10^7 rows.

    python -m benchmarks.jsonl [--rows 100000 1000000 10000000] [--reads 300000]

Each size is a file of its own in a temporary folder, about 190 bytes a row, written just before and so in the page
cache: what is measured is the program, not the disk. Each measurement is a process of its own on one core, five times
in turns; the table has the median, and in brackets slowest and fastest.

index, rows/s    from the opened file to the index on the disk, flushed, in its place in the cache
random, rows/s   rows.texts() of 64 rows each at random places: read, parsed, the text taken out
a CPU second     the same by the processor time that the process had, for machines that others use as well
own memory, MiB  what only this process uses (anonymous or written pages) after the reads; the index and the file are
                 pages of the system's cache, which all processes share and the system takes back when it needs them
grown, MiB       of that, since before the index was opened
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import table
from data.rows import Rows

REPEATS = 5
BATCH = 64
ROWS_AT_ONCE = 100_000
BYTES_A_ROW = 200  # the rows are a little shorter; the index, 8 bytes a row, is built beside its last version
WORDS = "the of and a to in is that it was for on are as with his they at be this from have or by one had not".split()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    options.add_argument("--reads", type=int, default=300_000)
    chosen = options.parse_args()

    found: dict[int, list[dict[str, float]]] = {rows: [] for rows in chosen.rows}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_space(folder, sum(chosen.rows))
        files = {rows: generate(folder / f"{rows}.jsonl", rows) for rows in chosen.rows}
        for turn in range(REPEATS):
            for rows, path in files.items():
                cache = folder / f"cache-{turn}"
                built = alone(build, path, cache)
                found[rows].append(built | alone(read, path, cache, chosen.reads, turn))
                shutil.rmtree(cache)
        sizes = {rows: path.stat().st_size for rows, path in files.items()}
    lines = [row_of(rows, sizes[rows], found[rows]) for rows in chosen.rows]
    print(table.markdown(lines))
    about = {"reads": chosen.reads, "repeats": REPEATS, "rows a read": BATCH}
    print(f"written to {table.write('jsonl', lines, **about)}")


def check_space(folder: Path, rows: int) -> None:
    """Ends the program where the files would fill the disk."""
    needed, free = rows * BYTES_A_ROW * 1.2, shutil.disk_usage(folder).free
    if free < needed:
        raise SystemExit(f"{folder}: {free / 2**30:.1f} GiB are free, {needed / 2**30:.1f} are needed; set TMPDIR")


def generate(path: Path, rows: int) -> Path:
    """A file of `rows` rows: a number, a source and a text of 8 to 44 common words."""
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


def alone(measure: Callable[..., dict], *arguments) -> dict[str, float]:
    """What `measure` gives in a fresh process on one core."""
    with multiprocessing.get_context("spawn").Pool(1, initializer=_one_core) as pool:
        return pool.apply(measure, arguments)


def build(path: Path, cache: Path) -> dict[str, float]:
    """Indexes the file."""
    with Clock() as clock:
        rows = Rows([path], cache)
    return {"index": len(rows) / clock.seconds, "index cpu": len(rows) / clock.cpu_seconds}


def read(path: Path, cache: Path, reads: int, seed: int) -> dict[str, float]:
    """Reads rows at random places through the index that is there."""
    before = own_memory()
    rows = Rows([path], cache)
    batches = np.random.default_rng(seed).integers(0, len(rows), (reads // BATCH, BATCH))
    with Clock() as clock:
        for indices in batches:
            rows.texts(indices, ["text"])
    own, count = own_memory(), batches.size
    return {
        "random": count / clock.seconds,
        "random cpu": count / clock.cpu_seconds,
        "own": own,
        "grown": own - before,
    }


class Clock:
    """Seconds that a block takes, by the clock and of this process on the processor."""

    def __enter__(self) -> Clock:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error) -> None:
        self.seconds, self.cpu_seconds = time.perf_counter() - self._start[0], time.process_time() - self._start[1]


def own_memory() -> float:
    """MiB that this process alone uses and the system cannot take back."""
    kib = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        kib[name] = int(value.split()[0])
    return max(kib["Anonymous"], kib["Private_Dirty"]) / 1024


def row_of(rows: int, size: int, found: list[dict[str, float]]) -> dict:
    """A line of the table."""

    def spread(name: str, digits: int = 0) -> str:
        values = [one[name] for one in found]
        middle, low, high = (f"{v:,.{digits}f}" for v in (statistics.median(values), min(values), max(values)))
        return f"{middle} ({low} to {high})"

    return {
        "rows": f"{rows:,}",
        "bytes a row": f"{size / rows:.0f}",
        "index, rows/s": spread("index"),
        "index, rows a CPU second": spread("index cpu"),
        "random, rows/s": spread("random"),
        "random, rows a CPU second": spread("random cpu"),
        "own memory, MiB": spread("own", 1),
        "grown, MiB": spread("grown", 1),
    }


def _one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


if __name__ == "__main__":
    main()
