"""This project's packages have common names: what installs them, or hides one, is told in a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import TrainingError
from conf.instantiate import resolve

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("how", [["."], ["-e", "."]])
def test_pip_is_told_in_a_sentence_that_this_is_no_package(how, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(tmp_path), *how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "not a package: pip install -r requirements.txt" in done.stdout + done.stderr


@pytest.mark.parametrize("begin", [["-c", "import training.api"], ["-m", "benchmarks", "pipelining", "--help"]])
def test_a_folder_that_hides_a_package_of_this_project_is_named(begin, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *begin]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert f"the package 'models' of {ROOT} is hidden by {tmp_path}/models" in last and "sys.path.insert" in last


def test_a_target_in_a_folder_that_a_package_of_this_project_hides_is_an_error_that_says_so(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(TrainingError, match=f"{tmp_path}/models/mine is hidden by .* give its folder 'models' another"):
        resolve("models.mine.Net")
