"""Which room may import which: the contracts in pyproject.toml, checked by import-linter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("importlinter", reason="import-linter is a test dependency (requirements-dev.txt)")

ROOT = Path(__file__).resolve().parents[1]
CHECK = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def check(folder: Path) -> tuple[int, str]:
    """Returns the exit code of import-linter in a folder, and what it says."""
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_every_room_imports_only_what_it_may():
    code, said = check(ROOT)
    assert code == 0, said


def test_forbidden_imports_are_named_even_inside_functions(tmp_path):
    forbidden = {
        "data/dataset.py": ("import models.chain", "data is not allowed to import models"),
        "parallel/plan.py": ("import launchers", "parallel is not allowed to import launchers"),
        "launchers/world.py": ("import data.dataset", "launchers is not allowed to import data"),
        "training/reporting/metrics.py": ("import training.loop", "training.reporting is not allowed to import"),
        "training/checkpoint/load.py": ("import training.reporting", "training.checkpoint is not allowed to import"),
        "common/errors.py": ("import common.machine", "No cycles are allowed in common"),
        "common/machine.py": ("import common.errors", "No cycles are allowed in common"),
    }
    others = shutil.ignore_patterns("tests", ".*", "__pycache__", "outputs", "multirun", "docs")
    copy = Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=others))
    for file, (line, _) in forbidden.items():
        with open(copy / file, "a") as module:
            module.write(f"\n\ndef late():\n    {line}\n")
    code, said = check(copy)
    assert code == 1
    assert [file for file, (_, named) in forbidden.items() if named not in said] == [], said
