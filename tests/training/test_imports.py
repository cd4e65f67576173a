"""What a command imports: torch only where something is built, and what takes seconds only where it is used."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import Run, train

HEAVY = ["torch", "numpy", "wandb", "matplotlib", "torchvision", "sympy"]
COMPILER = ["torch._dynamo", "sympy"]
ONLY_WHERE_USED = ["matplotlib", "torchvision", "torch.distributed.pipelining", "torch.utils.tensorboard"]


def imports(overrides: list[str], folder: Path) -> tuple[Run, set[str]]:
    """What came of ``python train.py …``, and the names of all modules that its first process imported."""
    run = train(overrides, folder, prefix=("-X", "importtime"))
    return run, set(re.findall(r"^import time:.*\| +(\S+)$", run.stderr, flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param(["--help"], 0, id="help"),
        pytest.param(["--cfg", "job"], 0, id="the whole configuration"),
        pytest.param(["model=nonsense"], 1, id="no such option"),
        pytest.param(["train.stpes=3"], 1, id="no such key"),
        pytest.param(["train.steps=many"], 1, id="another type", marks=pytest.mark.slow),
        pytest.param(["train.steps=3", "train.steps"], 1, id="not an override"),
    ],
)
def test_an_answer_that_composition_gives_comes_without_torch(arguments, code, tmp_path):
    run, imported = imports(arguments, tmp_path / "run")
    assert run.code == code, run.console
    assert imported.isdisjoint(HEAVY)


def test_a_sweep_over_an_option_that_is_not_there_is_reported_without_torch(tmp_path):
    run, imported = imports(["-m", "model=nonsense", f"hydra.sweep.dir={tmp_path}/sweep"], tmp_path / "run")
    assert run.code == 1
    assert "nonsense" in run.console
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.chunks=abc"], "parallel.chunks=abc must be a whole number"),
        (["optim.lr=-1"], "optim: Invalid learning rate: -1"),
        pytest.param(
            ["parallel=pipe_ddp", "parallel.chunks=4", "train.global_batch_size=10"],
            "the nearest that can are 8 and 16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_broken_rule_is_found_before_torch_imports_its_compiler(overrides, message, tmp_path):
    run, imported = imports(overrides, tmp_path / "run")
    assert run.code == 1
    assert message in run.stderr
    assert imported.isdisjoint([*COMPILER, *ONLY_WHERE_USED, "wandb"])


def test_a_run_imports_nothing_that_only_other_runs_use(tmp_path):
    run, imported = imports(["train.steps=1", "logger=none"], tmp_path / "run")
    assert run.code == 0, run.console
    assert imported.isdisjoint([*ONLY_WHERE_USED, "torch._dynamo", "wandb"])


def test_the_compiler_that_a_run_has_put_off_is_imported_by_what_compiles():
    program = """
import torch
from parallel.devices import import_compiler_late
import_compiler_late()
layer = torch.nn.Linear(2, 2)
torch.optim.SGD(layer.parameters(), lr=0.1).step()
settings, late = torch._dynamo.config, "torch._dynamo.eval_frame" not in __import__("sys").modules
same = torch.equal(torch.compile(layer, backend="eager")(torch.ones(1, 2)), layer(torch.ones(1, 2)))
assert late and same and torch._dynamo.config is settings and torch._dynamo.OptimizedModule
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
