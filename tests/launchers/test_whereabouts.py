"""The page on which workers note how far they have come, and the launching process that it wants them to stop."""

from launchers.failure import stalled
from launchers.heartbeat import Board, Whereabouts


def test_what_one_process_writes_another_reads(tmp_path):
    parent, worker = Board(tmp_path / "board", ranks=3), Board(tmp_path / "board")
    assert not worker.stop_wanted()
    parent.ask_to_stop()
    assert worker.stop_wanted()
    worker.write(2, Whereabouts(7, 12.5, "reading data"))
    assert parent.read(2) == Whereabouts(7, 12.5, "reading data")
    assert parent.read(1) == Whereabouts(0, 0.0, "")


def test_a_long_text_stays_in_its_row(tmp_path):
    board = Board(tmp_path / "board", ranks=2)
    board.write(1, Whereabouts(1, 1.0, "second"))
    board.write(0, Whereabouts(1, 1.0, "x" * 500))
    assert board.read(0).doing == "x" * 48
    assert board.read(1).doing == "second"


def test_a_stalled_rank_is_named_with_its_last_step():
    at = Whereabouts(7, 0.0, "in step 8")
    text = str(stalled({2: at}, {2: 0}, timeout_s=30.0))
    assert text.startswith("rank 2 has not moved since step 7 for ")
    assert "(parallel.timeout_s=30): in step 8" in text
