"""What can be run with ``-m`` says what it is and refuses what it does not know, before it measures anything."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

import benchmarks

FOLDER = Path(benchmarks.__file__).parent
PROGRAMS = sorted(path for path in FOLDER.rglob("*.py") if '__name__ == "__main__"' in path.read_text())
MODULES = [".".join(path.relative_to(FOLDER.parent).with_suffix("").parts) for path in PROGRAMS]


@pytest.mark.parametrize("module", [*MODULES, "training.export.serve_check"])
def test_a_program_explains_itself_and_refuses_unknown_arguments(module, monkeypatch, capsys):
    program = import_module(module)
    for argument, code in (("--help", 0), ("--nonsense", 2)):
        monkeypatch.setattr(sys, "argv", [module, argument])
        with pytest.raises(SystemExit) as leaving:
            program.main()
        assert leaving.value.code == code, capsys.readouterr().err
