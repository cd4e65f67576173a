"""Everything that is measured here, one table or picture each.

    python -m benchmarks NAME [--quick] [OPTION …]     (--help after a NAME lists its options)

--quick goes through a benchmark at tiny sizes, and writes nothing into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

NAMES = (
    "ddp", "exporting", "faults", "first_run", "gpt2", "gpu", "jsonl", "overhead", "parity", "pipelining", "promise",
    "published_figures", "readme", "sampling",
)  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Run the benchmark that the first argument names with the others, and return its exit code."""
    listed = "\n".join(f"{name:18} {_first_line(name)}" for name in NAMES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=f"{__doc__}\n{listed}", usage="%(prog)s NAME [--quick] [OPTION …]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    name = parser.parse_args(arguments[:1]).name
    module = import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for flags, option in module.OPTIONS.items():
        parser.add_argument(*flags.split(), **option)
    return module.main(parser.parse_args(arguments[1:])) or 0


def _first_line(name: str) -> str:
    """Return what a benchmark says of itself, without importing it: most of them import torch."""
    return ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text())).partition("\n")[0]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
