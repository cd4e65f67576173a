"""What a command imports: torch only where something is built, and what takes seconds only where it is used."""

import re
import subprocess
import sys
from collections.abc import Iterable

import pytest
import torch
from commandline import ROOT, train
from torch.fx.experimental import symbolic_shapes

from parallel import late_imports
from parallel.strategies import types_workers

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
        (
            ["train.steps=1", "logger=none"],
            "",
            [*ONLY_WHERE_USED, "sympy.core"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "torch" not in value else "",
)
def test_a_command_imports_only_what_it_needs(words, says, never, tmp_path):
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    run = train(words, tmp_path / "run", prefix=("-X", "importtime"), own_folder="--help" not in words)
    assert run.code == (1 if says else 0) and says in run.stderr, run.console
    assert "conf" in imported_by(run) and {*imported_by(run)}.isdisjoint(never)


@pytest.mark.slow
def test_the_compiler_that_a_run_has_put_off_is_imported_by_what_compiles():
    program = """
import sys
import torch
from parallel.late_imports import import_compiler_late
import_compiler_late()
layer = torch.nn.Linear(2, 2)
torch.optim.SGD(layer.parameters(), lr=0.1).step()
settings, late = torch._dynamo.config, "torch._dynamo.eval_frame" not in sys.modules
import torch.distributed.pipelining.schedules as schedules
import torch.distributed.tensor._decompositions as decompositions
product = torch.empty(3, 4, device="meta") @ torch.empty(4, 2, device="meta")
assert late and product.shape == (3, 2) and not {"torch._dynamo.eval_frame", "sympy.core"} & sys.modules.keys()

compiled = torch.compile(layer, backend="eager")
assert torch.equal(compiled(torch.ones(1, 2)), layer(torch.ones(1, 2))) and torch._dynamo.config is settings
assert isinstance(compiled, schedules.OptimizedModule)

import torch.fx.experimental.symbolic_shapes as symbols
assert symbols.GuardOnDataDependentSymNode is decompositions.GuardOnDataDependentSymNode
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_sympy_is_the_users_own_as_soon_as_their_code_asks_for_it():
    program = """
import importlib.util
import torch
from parallel.late_imports import import_compiler_late
import_compiler_late()
assert importlib.util.find_spec("sympy").submodule_search_locations
import sympy
class Mine(sympy.Basic): pass
assert isinstance(sympy.Symbol("x"), sympy.Basic) and Mine.__mro__[1].__module__ == "sympy.core.basic"
from sympy.core.numbers import Integer
assert Integer(2) + sympy.Integer(3) == 5 and not hasattr(sympy, "nonsense")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def imported_by(run) -> list[str]:
    return re.findall(r"^import time:.*\| +(\S+)$", run.stderr, flags=re.MULTILINE)


def test_the_processes_of_a_run_import_no_compiler_and_the_process_that_forks_them_is_started_once(tmp_path):
    run = train(["parallel=pipe_fsdp", "train.steps=1", "logger=none"], tmp_path / "run", prefix=("-X", "importtime"))
    assert run.code == 0 and imported_by(run).count("training.command.preload") == 1, run.console
    assert not {"sympy.core", "torch._dynamo.eval_frame"} & {*imported_by(run)}


def test_it_is_started_again_if_the_configuration_has_variables_for_it(tmp_path):
    words = ["parallel=ddp", "parallel.env={PYTHONPROFILEIMPORTTIME: 1}", "train.steps=1", "logger=none"]
    run = train(words, tmp_path / "run", prefix=("-u",))
    assert run.code == 0 and "training.command.preload" in imported_by(run), run.console


def test_it_ends_with_a_command_that_comes_to_no_run(tmp_path):
    """It writes into the same pipe, whose reader would wait for it."""
    run = train(["parallel=ddp", "train.stpes=3"], tmp_path / "run", prefix=("-X", "importtime"))
    assert run.code == 1 and "train.steps" in run.stderr and "training.run.rank" not in imported_by(run)


@pytest.mark.parametrize(
    "words, early",
    [
        ("parallel=ddp", True),
        ("parallel=ddp mode=eval", True),
        ("parallel=fsdp parallel=single", False),
        ("parallel=mine", False),
        ("parallel=ddp launcher=slurm", False),
        ("parallel=ddp train.compile=true", False),
        ("-m parallel=ddp", False),
        ("parallel=ddp mode=plan", False),
        ("model=gpt2", False),
    ],
)
def test_a_line_that_names_a_strategy_with_workers_starts_it_before_it_is_composed(words, early):
    assert types_workers(words.split()) is early


@pytest.mark.parametrize(
    "name, values",
    [
        ("expect_true", (True,)),
        ("guard_int", (3,)),
        ("guard_or_false", (False,)),
        ("guard_or_true", (False,)),
        ("guard_size_oblivious", (True,)),
        ("guarding_hint_or_throw", (3,)),
        ("statically_known_true", (False,)),
        ("_iterate_exprs", ((2, torch.ones(2, 3)),)),
        ("_iterate_nodes", ((2, torch.ones(2, 3)),)),
        ("has_free_unbacked_symbols", (torch.ones(2, 3),)),
        ("is_nested_int", (3,)),
        ("compute_unbacked_bindings", (None, torch.ones(2, 3))),
        ("free_unbacked_symbols", (5,)),
        ("has_guarding_hint", (5,)),
        ("sym_and", (True, True, False)),
        ("sym_and", (True, True)),
        ("sym_eq", ((2, 3), [2, 3])),
        ("sym_eq", ((2, 3), (2, 3, 1))),
        ("sym_eq", (4, 5)),
        ("sym_or", (False, True)),
        ("sym_or", (False,)),
    ],
)
def test_of_numbers_its_stand_in_says_what_torch_says(name, values):
    theirs = getattr(symbolic_shapes, name)(*values)
    ours = late_imports._of_numbers(symbolic_shapes.__name__, name, *values)
    assert list(theirs) == list(ours) if isinstance(theirs, Iterable) else theirs == ours


def test_a_mode_with_workers_imports_torch_after_it_has_had_their_process_started():
    modes = [f"training.command.modes.{mode}" for mode in ("train", "eval", "plan", "compare", "verify")]
    code = f"import sys, {', '.join(modes)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=100).returncode == 0
