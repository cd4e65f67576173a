"""The Dockerfile: its commands, run here. ``.ci/run`` builds the image where a docker daemon answers."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from interpreters import ROOT, python

LINES = re.findall(r"^([A-Z]+) (.*)$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)


def values(instruction):
    return [value for name, value in LINES if name == instruction]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """What `COPY . .` puts into the image."""
    left_out = [line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()]
    folder = tmp_path_factory.mktemp("image") / "workspace"
    return shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_out, ".*"))


def test_its_python_is_the_one_of_the_whole_suite():
    assert values("FROM") == ["python:3.11-slim"]
    assert 'python-version: "3.11"' in (ROOT / ".github/workflows/ci.yml").read_text()


def test_what_it_installs_is_installed_here():
    install, user = values("RUN")
    (index,) = values("ARG")
    command = install.replace("pip install", f"{sys.executable} -m pip install --dry-run --no-deps")
    environ = os.environ | {"TORCH_INDEX": index.partition("=")[2]}
    done = subprocess.run(["sh", "-ec", command], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and "Would install" not in done.stdout, done.stderr
    assert subprocess.run(["sh", "-nc", user]).returncode == 0


def test_what_it_copies_trains(workspace, tmp_path):
    (entry,) = values("ENTRYPOINT")
    program, *words = json.loads(entry)
    assert program == "python"
    words += ["parallel=ddp", "train.steps=2", "train.epochs=null", "device=cpu", "logger=none"]
    done = python(*words, f"hydra.run.dir={tmp_path}", cwd=workspace, PYTHONPATH=None)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


def test_its_user_is_not_root_and_torchrun_finds_the_project_in_any_folder(workspace, tmp_path):
    assert values("USER") == ["1000"] and values("ENV") == [f"PYTHONPATH={values('WORKDIR')[0]}"]
    done = python("-m", "launchers.torchrun", "--help", cwd=tmp_path, PYTHONPATH=str(workspace))
    assert done.returncode == 0 and "training_script" in done.stdout, done.stderr
