"""What common.files writes is on the disk whole or not at all."""

import os

import pytest

from common.files import atomic_folder, explain, free_space, write_atomically


@pytest.mark.parametrize("data", ["π\n", b"\x00\xff"])
def test_a_file_is_written_whole_and_leaves_nothing_beside_it(tmp_path, data):
    path = tmp_path / "new" / "file"
    for content in (data[:1], data):
        write_atomically(path, content)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    path.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_a_folder_appears_when_it_is_whole(tmp_path):
    (tmp_path / "a" / ".name.tmp" / "left by a killed process").mkdir(parents=True)
    with atomic_folder(tmp_path / "a" / "name") as draft:
        assert not list(draft.iterdir())
        (draft / "inner").mkdir()
        (draft / "inner" / "file").write_text("x")
        assert not (tmp_path / "a" / "name").exists()
    assert (tmp_path / "a" / "name" / "inner" / "file").read_text() == "x"
    assert os.listdir(tmp_path / "a") == ["name"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_folder_that_cannot_be_filled_leaves_nothing(tmp_path, error):
    with pytest.raises(error), atomic_folder(tmp_path / "name") as draft:
        (draft / "file").write_text("x")
        raise error
    assert not list(tmp_path.iterdir())


def test_errors_name_the_free_space_of_the_nearest_folder(tmp_path):
    assert free_space(tmp_path / "not" / "there").endswith(f"MiB are free at {tmp_path}")
    assert explain(OSError(28, "No space left on device"), tmp_path).startswith("No space left on device; ")
    assert explain(ValueError("other"), tmp_path).startswith("other; ")
