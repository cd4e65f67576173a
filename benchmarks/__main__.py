"""Everything that is measured here, one table or picture each.

    python -m benchmarks NAME [PART …] [--quick] [--rounds N] [--output FOLDER]     (--help after a NAME explains it)

Tables go to benchmarks/results/. Those of a --quick run at tiny sizes go elsewhere, as do those of a part if all
parts have one table.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.table import RESULTS, TRIALS, Benchmark

NAMES = sorted(
    path.stem for path in Path(__file__).parent.glob("*.py") if "\nBENCHMARK = " in path.read_text(encoding="utf-8")
)


def run(arguments: Sequence[str]) -> None:
    """Run the benchmark that the first argument names with the others, and write its tables."""
    listed = "\n".join(f"{name:18} {_first_line(name)}" for name in NAMES)
    parser = _parser("python -m benchmarks", f"{__doc__}\n{listed}")
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    name = parser.parse_args(arguments[:1]).name
    module = import_module(f"benchmarks.{name}")
    chosen = _options(name, module.__doc__, module.BENCHMARK, arguments[1:])
    for table in module.BENCHMARK.measure(chosen):
        table.write(chosen.output)


def _options(name: str, about: str, benchmark: Benchmark, arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser(f"python -m benchmarks {name}", about)
    parser.set_defaults(parts=[])
    if benchmark.parts:
        about_parts = f"a part, or how parts begin; all of them: {', '.join(benchmark.parts)}"
        parser.add_argument("parts", nargs="*", metavar="PART", help=about_parts)
    for number, default in benchmark.numbers.items():
        parser.add_argument(number, nargs="?", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--quick", "--dry-run", action="store_true", help="tiny sizes, to check that it runs")
    if benchmark.rounds:
        parser.add_argument("--rounds", type=int, help=f"default: {benchmark.rounds}, and 1 with --quick")
    parser.add_argument("--output", type=Path, help="folder for the tables; default: benchmarks/results")
    chosen = parser.parse_args(arguments)
    words, chosen.parts = chosen.parts, []
    for word in words:
        found = [word] if word in benchmark.parts else [part for part in benchmark.parts if part.startswith(word)]
        if not found:
            parser.error(f"{word} is not one of the parts: {', '.join(benchmark.parts)}")
        chosen.parts += found
    if benchmark.rounds:
        chosen.rounds = chosen.rounds or (1 if chosen.quick else benchmark.rounds)
    incomplete = chosen.quick or (benchmark.one_table and chosen.parts)
    chosen.output = chosen.output or (TRIALS if incomplete else RESULTS)
    return chosen


def _parser(command: str, about: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=command, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _first_line(name: str) -> str:
    """Return what a benchmark says of itself, without importing it: most of them import torch."""
    return ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text())).partition("\n")[0]


if __name__ == "__main__":
    run(sys.argv[1:])
