"""This project's packages: which may import which, and what installs or hides one is told in a sentence."""

import shutil
import sys
from pathlib import Path

import pytest
from interpreters import ROOT, python

from common.errors import UserError
from conf.instantiate import resolve, why_foreign


def said_in(folder, *command, **more):
    """The exit code of a Python in that folder, and all that it says."""
    done = python(*command, cwd=folder, **more)
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


def test_forbidden_imports_are_named_even_inside_functions(tmp_path):
    """The contracts in pyproject.toml, which CI checks for the code as it is (`lint-imports`)."""
    pytest.importorskip("importlinter", reason="import-linter is a test dependency (requirements-dev.txt)")
    copy = copied_to(tmp_path)
    for file, (line, _) in FORBIDDEN.items():
        with open(copy / file, "a") as module:
            module.write(f"\n\ndef late():\n    {line}\n")
    code, said = said_in(copy, *LINT)
    assert code == 1
    assert [file for file, (_, named) in FORBIDDEN.items() if named not in said] == [], said


TYPES = ("-c", "import sys; from basedpyright.pyright import main; sys.exit(main())", "--pythonpath", sys.executable)
ROOMS = [*ROOT.glob("*/__init__.py"), *ROOT.glob("training/*/__init__.py")]
TYPED = ["train.py", *(str(file.relative_to(ROOT)) for file in ROOMS if file.parts[-2] not in ("tests", "benchmarks"))]


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


THEIRS = {  # the files of a folder with names of this project's packages
    "models/__init__.py": "WIDTH = 3\nfrom .mynet import Net\n",
    "models/mynet.py": "from torch import nn\nfrom models import WIDTH\nfrom models.losses import Sums\n"
    "from common import helper\nclass Net(nn.Linear):\n    def __init__(self): super().__init__(WIDTH, helper(2))\n",
    "data/mine.py": "from data.dataset import DataSet\nclass Mine(DataSet): pass\n",
    "common.py": "from pathlib import Path\nHOME = Path(__file__).parent\ndef helper(n): return n\n",
    "training/callbacks/mine.py": "from training.callbacks import Callback\nclass Mine(Callback): pass\n",
    "parallel/__init__.py": "",
    "conf.py": "WIDTH = 4\n",
}
CHECK = """
from common import HOME, helper
from common.errors import UserError
import conf, data.mine, models, models.mynet, parallel.plan, training.callbacks.mine
assert conf.WIDTH == 4 and conf.options("optim") and HOME.name == "theirs"
assert models.Net is models.mynet.Net and models.Net().weight.shape == (2, 3)
"""
ORDERS = {  # how a program of that folder begins
    "this project's folder first on the path": "import sys; sys.path.insert(0, ROOT); import training",
    "their modules first": "from common import helper; import conf; from training import train",
}


@pytest.fixture
def folder(tmp_path):
    for name, text in THEIRS.items():
        file = tmp_path / "theirs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "theirs"


@pytest.mark.parametrize("order", ORDERS)
def test_packages_of_the_user_with_the_names_of_this_projects_are_joined_with_them(order, folder):
    if order != "their modules first":
        (folder / "training" / "__init__.py").touch()
    (folder / "program.py").write_text(f"ROOT = {str(ROOT)!r}\n{ORDERS[order]}\n{CHECK}")
    code, said = said_in(folder.parent, str(folder / "program.py"), PYTHONPATH=str(ROOT))
    assert code == 0, said


def test_two_files_of_one_name_are_an_error_that_names_both(folder, monkeypatch):
    (folder / "mine.py").write_text("from models.losses import Mine as Net\n")
    (folder / "sched.py").write_text("class InvSq: pass\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    with pytest.raises(UserError, match=f"sched is .*sched.py, of Python, and not {folder}/sched.py: rename yours"):
        resolve("sched.InvSq")
    (folder / "models" / "losses.py").touch()  # what imports it would get this project's
    for target in ("mine.Net", "models.mynet.Net"):
        with pytest.raises(UserError, match=f"models.losses: {ROOT}/models/losses.py and {folder}/models/losses.py"):
            resolve(target)
    (folder / "program.py").write_text("import common\nfrom training import train")
    code, said = said_in(folder, "program.py", PYTHONPATH=str(ROOT))
    assert code == 1 and f"two files have models.losses: {ROOT}/models/losses.py and {folder}/models/losses.py" in said


def test_a_checkpoint_may_not_name_the_users_modules_in_a_package_of_this_project(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    assert [why_foreign(f"models.{name}") for name in ("mynet.Net", "Net", "toy.toy")] == [
        "it is of another package", "it is of another package", None,
    ]  # fmt: skip
