"""Each hostile input ends at once with exit code 1 and one line that names the key or the file, and leaves nothing."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ``cases`` and ``files``

from hostile_cases import CASES
from hostile_files import prepare

from common.errors import UserError

PATIENCE_S = 60  # of a machine that others keep busy; alone it is less than one


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hostile_input_ends_with_one_line_and_leaves_nothing(case, tmp_path, monkeypatch, capsys):
    from train import main

    folder, place = tmp_path / "files", tmp_path / "place"
    folder.mkdir()
    place.mkdir()
    prepare(folder, case.name)
    monkeypatch.chdir(place)
    overrides = [text.replace("{folder}", str(folder)) for text in case.overrides]
    if not any(text.startswith("hydra.run.dir=") for text in overrides):
        overrides.append("hydra.run.dir=run")
    overrides.sort(key=lambda text: not text.startswith("-"))  # Hydra wants its flags first
    begin = time.monotonic()
    code = main(overrides)
    seconds = time.monotonic() - begin
    printed = capsys.readouterr()
    assert code == 1, printed
    assert printed.err.startswith("error: ") and printed.err.count("error: ") == 1, printed.err
    assert "Traceback" not in printed.out + printed.err
    missing = [words for words in case.says if words not in printed.err]
    assert not missing, printed.err
    assert not list(place.iterdir()), "something was left behind"
    assert seconds < PATIENCE_S


def test_the_table_is_large():
    assert len(CASES) >= 200 and len({case.name for case in CASES}) == len(CASES)


def test_a_rank_executes_nothing_that_only_rank_0_has_named():
    """Its configuration has come through a store that others may reach."""
    from conf.trust import check_received

    typed = ["allow=[mine,other.module]", "import_from=['/a','/c']"]
    check_received({"allow": ["mine", "other.module"], "import_from": ["/c"]}, typed)
    for tree in ({"allow": ["os"]}, {"import_from": ["/d"]}, {"allow": ["mine", "other"]}):
        with pytest.raises(UserError, match="rank 0 sends .* was not typed on this rank"):
            check_received(tree, typed)
