"""The runner explains each benchmark and refuses what it does not know, before it measures anything."""

import pytest

from benchmarks.__main__ import NAMES, run


@pytest.mark.parametrize("name", ["", *NAMES])
def test_a_benchmark_explains_itself_and_refuses_unknown_arguments(name, capsys):
    for argument, code in (("--help", 0), ("--nonsense", 2)):
        with pytest.raises(SystemExit) as leaving:
            run([*filter(None, [name]), argument])
        said = capsys.readouterr()
        assert leaving.value.code == code, said.err
        assert code or f"python -m benchmarks {name}".strip() in said.out


def test_help_lists_every_benchmark_with_its_first_line(capsys):
    with pytest.raises(SystemExit):
        run(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n{name} " in said for name in NAMES)
