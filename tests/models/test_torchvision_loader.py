"""torchvision works also where its compiled extension does not fit the installed torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data.images import load_torchvision

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def torchvision():
    return load_torchvision()


def test_one_that_does_not_fit_is_said_once_with_what_to_install(torchvision, tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import sys\n"
        "if 'tried' not in sys.argv:\n"
        "    sys.argv.append('tried')\n"
        "    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "__version__ = '0.1.2'\n"
    )
    twice = "from data.images import load_torchvision as load; load(); load()"
    run = subprocess.run(
        [sys.executable, "-c", twice], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert run.stderr.count("torchvision 0.1.2 does not fit torch") == 1
    assert "pip install --force-reinstall torch torchvision --index-url https://download.pytorch.org" in run.stderr


def test_a_second_call_gives_the_same_module(torchvision):
    assert load_torchvision() is torchvision is sys.modules["torchvision"]


def test_resnet18_runs_and_learns(torchvision):
    model = torchvision.models.resnet18(num_classes=7)
    output = model(torch.randn(2, 3, 32, 32))
    output.sum().backward()
    assert output.shape == (2, 7)
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_transforms_run(torchvision):
    from torchvision.transforms import v2

    assert v2.functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)


def test_another_error_at_import_is_not_hidden(torchvision, monkeypatch):
    def broken(name):
        raise RuntimeError("something else")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(RuntimeError, match="something else"):
        load_torchvision()
