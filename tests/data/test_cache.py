"""Folders that are built once, whole or not at all."""

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from common.errors import DataError
from data import cache
from data.cache import cache_root, cached_folder

BUILDER = """
import sys, time
from pathlib import Path
from data.cache import cached_folder
root, seconds = Path(sys.argv[1]), float(sys.argv[2])
def build(folder):
    with open(root / "builds.log", "a") as log:
        log.write("built\\n")
    (folder / "half").write_text("half")
    time.sleep(seconds)
    (folder / "whole").write_text("whole")
print((cached_folder(root / "cache", "key", build) / "whole").read_text())
"""


@pytest.fixture
def start_builder(started, tmp_path):
    return lambda seconds: started("-c", BUILDER, str(tmp_path), str(seconds))


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def build_whole(folder: Path) -> None:
    (folder / "whole").write_text("whole")


def test_of_racing_processes_one_builds_and_all_get_the_whole(tmp_path, start_builder):
    racers = [start_builder(0.5) for _ in range(3)]
    assert [racer.communicate(timeout=20)[0] for racer in racers] == ["whole\n"] * 3
    assert (tmp_path / "builds.log").read_text() == "built\n"


def test_a_killed_build_is_cleared_away_by_the_next(tmp_path, start_builder):
    killed = start_builder(60)
    end = time.monotonic() + 10
    while not list(tmp_path.glob("cache/.*/half")):
        assert time.monotonic() < end, "nothing was built for 10 s"
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "cache" / "key").exists()
    assert start_builder(0).communicate(timeout=20)[0] == "whole\n"
    assert visible(tmp_path / "cache") == ["key"]


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=["a full disk", "a read-only one", "one of others"]
)
def test_where_the_disk_cannot_take_them_the_error_says_path_free_space_and_way_out_and_nothing_is_left(
    tmp_path, number
):
    def build(draft):
        (draft / "half").write_text("half")
        raise OSError(number, os.strerror(number))

    with pytest.raises(DataError, match=os.strerror(number)) as caught:
        cached_folder(tmp_path / "cache", "key", build)
    for part in (str(tmp_path / "cache" / "key"), "MiB are free", "data.cache_dir="):
        assert part in str(caught.value)
    assert visible(tmp_path / "cache") == []


def test_a_file_that_cannot_be_read_for_it_is_no_error_of_the_cache(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cached_folder(tmp_path / "cache", "key", lambda folder: (tmp_path / "nowhere").read_bytes())


def test_a_cache_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=f"{tmp_path}/file/cache/key.*data.cache_dir="):
        cached_folder(tmp_path / "file" / "cache", "key", build_whole)


def test_waiting_says_what_for(tmp_path, monkeypatch, caplog, start_builder):
    monkeypatch.setattr(cache, "_WARN_AFTER_S", 0.1)
    start_builder(0.5)
    while not list(tmp_path.glob("cache/.*/half")):
        time.sleep(0.01)
    assert (cached_folder(tmp_path / "cache", "key", build_whole) / "whole").exists()
    assert f"waiting for another process to build {tmp_path}/cache/key" in caplog.text


def test_the_default_is_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / "one-word-parallel"
