"""An outside process between two ranks, which replaces their messages, can end the run and can execute nothing."""

from pathlib import Path

from commandline import ROOT, Forked, environment

SCRIPT = Path(__file__).with_name("relayed.py")


def test_a_relay_ends_the_run_with_an_error_and_executes_nothing(tmp_path):
    mark, said = tmp_path / "executed", [tmp_path / f"said-{rank}" for rank in range(2)]
    ranks = []
    for rank, path in enumerate(said):
        path.touch()
        output = {"stdout": str(path), "stderr": str(path), "before": None}
        arguments = [str(SCRIPT), str(rank), str(tmp_path / "store"), str(mark)]
        ranks.append(Forked(arguments, cwd=ROOT, env=environment(), **output))
    try:
        codes = [rank.wait(100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    errors = "".join(path.read_text() for path in said)
    assert "replaced" in errors and 1 in codes, errors
    assert not mark.exists()
