"""This project's packages: which may import which, and what installs or hides one is told in a sentence."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import ROOT

from common.errors import TrainingError
from conf.instantiate import resolve


def said_in(folder, *command, **more):
    """The exit code of a Python in that folder, and all that it says."""
    env = {**os.environ, **more}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def copied_to(folder):
    """A copy of the packages in that folder."""
    others = shutil.ignore_patterns("tests", ".*", "__pycache__", "outputs", "multirun", "docs")
    return Path(shutil.copytree(ROOT, folder / "copy", ignore=others))


LINT = ("-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))")
FORBIDDEN = {
    "data/dataset.py": ("import models.chain", "data is not allowed to import models"),
    "parallel/plan.py": ("import launchers", "parallel is not allowed to import launchers"),
    "launchers/world.py": ("import data.dataset", "launchers is not allowed to import data"),
    "training/reporting/metrics.py": ("import training.run.loop", "training.reporting is not allowed to import"),
    "training/checkpoint/load.py": ("import training.reporting", "training.checkpoint is not allowed to import"),
    "common/errors.py": ("import common.machine", "No cycles are allowed in common"),
    "common/machine.py": ("import common.errors", "No cycles are allowed in common"),
}


@pytest.fixture
def lint():
    pytest.importorskip("importlinter", reason="import-linter is a test dependency (requirements-dev.txt)")
    return lambda folder: said_in(folder, *LINT)


def test_every_room_imports_only_what_it_may(lint):
    """The contracts in pyproject.toml."""
    code, said = lint(ROOT)
    assert code == 0, said


def test_forbidden_imports_are_named_even_inside_functions(lint, tmp_path):
    copy = copied_to(tmp_path)
    for file, (line, _) in FORBIDDEN.items():
        with open(copy / file, "a") as module:
            module.write(f"\n\ndef late():\n    {line}\n")
    code, said = lint(copy)
    assert code == 1
    assert [file for file, (_, named) in FORBIDDEN.items() if named not in said] == [], said


TYPES = ("-c", "import sys; from basedpyright.pyright import main; sys.exit(main())", "--pythonpath", sys.executable)
TYPED = [f"{room}/__init__.py" for room in ("common", "launchers", "models", "data", "conf", "planner", "parallel")]
TYPED += [
    f"training/{room}/__init__.py"
    for room in ("checkpoint", "callbacks", "command", "export", "optimizer", "reporting", "run", "studies")
]
TYPED += ["train.py", "training/__init__.py"]


@pytest.mark.slow  # the checker takes 40 s, and CI runs it on the code as it is
def test_a_wrong_type_is_named_in_every_room_that_is_checked_and_nothing_else_is(tmp_path):
    pytest.importorskip("basedpyright", reason="basedpyright is a test dependency (requirements-dev.txt)")
    copy = copied_to(tmp_path)
    for file in TYPED:
        with open(copy / file, "a") as module:
            module.write('\n\nsize: int = "large"\n')
    code, said = said_in(copy, *TYPES)
    assert code == 1 and said.count(" - error: ") == len(TYPED), said
    assert [file for file in TYPED if f"{copy / file}:" not in said] == [], said


@pytest.mark.slow
@pytest.mark.parametrize("how", [["."], ["-e", "."]])
def test_pip_is_told_in_a_sentence_that_this_is_no_package(how, tmp_path):
    code, said = said_in(ROOT, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(tmp_path), *how)
    assert code != 0 and "not a package: pip install -r requirements.txt" in said


@pytest.mark.parametrize("begin", [["-c", "import training.command.api"], ["-m", "benchmarks", "pipelining", "--help"]])
def test_a_folder_that_hides_a_package_of_this_project_is_named(begin, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    last = said_in(tmp_path, *begin, PYTHONPATH=str(ROOT))[1].strip().splitlines()[-1]
    assert f"the package 'models' of {ROOT} is hidden by {tmp_path}/models" in last and "sys.path.insert" in last


def test_a_target_in_a_folder_that_a_package_of_this_project_hides_is_an_error_that_says_so(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(
        TrainingError, match="models.mine.*your own folder is not searched if it has the name of a package"
    ):
        resolve("models.mine.Net")
