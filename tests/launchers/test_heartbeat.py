"""The page on which workers note how far they have come, and the launching process asks them to stop."""

from launchers.failure import stalled
from launchers.heartbeat import Board, Heartbeat


def test_what_one_process_writes_another_reads(tmp_path):
    parent, worker = Board(tmp_path / "board", ranks=3), Board(tmp_path / "board")
    assert not worker.stop_wanted()
    parent.ask_to_stop()
    assert worker.stop_wanted()
    worker.write(2, Heartbeat(7, 12.5, "reading data"))
    assert parent.read(2) == Heartbeat(7, 12.5, "reading data")
    assert parent.read(1) == Heartbeat(0, 0.0, "")


def test_a_long_text_stays_in_its_row(tmp_path):
    board = Board(tmp_path / "board", ranks=2)
    board.write(1, Heartbeat(1, 1.0, "second"))
    board.write(0, Heartbeat(1, 1.0, "x" * 500))
    assert board.read(0).doing == "x" * 48
    assert board.read(1).doing == "second"


def test_a_stalled_rank_is_named_with_its_last_step():
    at = Heartbeat(7, 0.0, "in step 8")
    text = str(stalled({2: at}, {2: 0}, {}, timeout_s=30.0))
    assert text.startswith("rank 2 has not moved since step 7 for ")
    assert "(parallel.timeout_s=30): in step 8" in text
