"""What a command imports: torch only where something is built, and what takes seconds only where it is used."""

import re
import subprocess
import sys

import pytest
from commandline import ROOT, train

HEAVY = ["torch", "numpy", "wandb", "matplotlib", "torchvision", "sympy"]
ONLY_WHERE_USED = [
    "torch._dynamo", "wandb", "matplotlib", "torchvision", "torch.distributed.pipelining", "torch.utils.tensorboard",
]  # fmt: skip


@pytest.mark.parametrize(
    "words, says, never",
    [
        (["--help"], "", HEAVY),
        (["--help", "parallel"], "", HEAVY),
        pytest.param(["--help", "model=gpt2"], "", HEAVY, marks=pytest.mark.slow),
        pytest.param(["--help", "paralel"], "did you mean parallel", HEAVY, marks=pytest.mark.slow),
        (["--cfg", "job"], "", HEAVY),
        # Answers that composition gives.
        (["train.stpes=3"], "train.steps", HEAVY),
        (["-m", "model=nonsense", "hydra.sweep.dir=FOLDER/sweep"], "nonsense", ["torch"]),
        # Rules that are broken.
        pytest.param(
            ["optim.lr=-1"], "optim: Invalid learning rate: -1", [*ONLY_WHERE_USED, "sympy"], marks=pytest.mark.slow
        ),
        (["train.steps=1", "logger=none"], "", ONLY_WHERE_USED),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "torch" not in value else "",
)
def test_a_command_imports_only_what_it_needs(words, says, never, tmp_path):
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    run = train(words, tmp_path / "run", prefix=("-X", "importtime"), own_folder="--help" not in words)
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", run.stderr, flags=re.MULTILINE))
    assert run.code == (1 if says else 0) and says in run.stderr, run.console
    assert "conf" in imported and imported.isdisjoint(never)


@pytest.mark.slow
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
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_mode_with_workers_imports_torch_after_it_has_had_their_process_started():
    modes = [f"training.command.modes.{mode}" for mode in ("train", "eval", "plan", "compare", "verify")]
    code = f"import sys, {', '.join(modes)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=100).returncode == 0
