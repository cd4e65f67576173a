"""Folders that are built once, whole or not at all."""

import errno
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from common.errors import DataError
from data import cache
from data.cache import cached_folder, default_cache_dir, file_lock

REPOSITORY = Path(__file__).parents[2]

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


def start_builder(root: Path, seconds: float) -> subprocess.Popen:
    command = [sys.executable, "-c", BUILDER, str(root), str(seconds)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def build_whole(folder: Path) -> None:
    (folder / "whole").write_text("whole")


def refusing(folder: Path, number: int = errno.ENOSPC):
    """A build that fails in the cache ``folder`` only."""

    def build(draft):
        build_whole(draft)
        if folder in draft.parents:
            raise OSError(number, os.strerror(number))

    return build


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Another disk, so to speak, for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_of_racing_processes_one_builds_and_all_get_the_whole(tmp_path):
    racers = [start_builder(tmp_path, 0.5) for _ in range(3)]
    assert [racer.communicate(timeout=20)[0] for racer in racers] == ["whole\n"] * 3
    assert (tmp_path / "builds.log").read_text() == "built\n"


def test_a_killed_build_is_cleared_away_by_the_next(tmp_path):
    killed = start_builder(tmp_path, 60)
    end = time.monotonic() + 10
    while not list(tmp_path.glob("cache/.*/half")):
        assert time.monotonic() < end, "nothing was built for 10 s"
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "cache" / "key").exists()
    assert start_builder(tmp_path, 0).communicate(timeout=20)[0] == "whole\n"
    assert visible(tmp_path / "cache") == ["key"]


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 2)], ids=["lost", "cut short"])
def test_a_folder_whose_files_are_no_longer_whole_is_built_again(tmp_path, harm):
    harm(cached_folder(tmp_path, "key", build_whole) / "whole")
    assert (cached_folder(tmp_path, "key", build_whole) / "whole").read_text() == "whole"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_where_the_disk_cannot_take_them_data_lie_in_a_temporary_folder_until_the_end(
    number, tmp_path, temporary, monkeypatch, caplog
):
    at_exit = []
    monkeypatch.setattr("atexit.register", lambda *call, **options: at_exit.append((call, options)))
    root = tmp_path / "cache"
    with caplog.at_level(logging.WARNING):
        folder = cached_folder(root, "key", refusing(root, number))
    assert temporary in folder.parents and (folder / "whole").read_text() == "whole"
    for words in (str(root / "key"), os.strerror(number), "MiB are free", str(folder)):
        assert words in caplog.text
    caplog.clear()
    assert cached_folder(root, "key", lambda folder: pytest.fail("built twice")) == folder, "by another rank"
    assert not caplog.records
    [((function, removed), options)] = at_exit
    function(removed, **options)
    assert not folder.exists()
    assert cached_folder(root, "key", lambda folder: None) == root / "key", "the next run tries again"


def test_a_temporary_folder_that_others_can_write_to_is_not_used(tmp_path, temporary):
    planted = temporary / f"one-word-parallel-{os.getuid()}"
    (planted / "key").mkdir(parents=True)
    planted.chmod(0o777)
    root = tmp_path / "cache"
    with pytest.raises(DataError, match="No space left.*Nor .*other users can write there"):
        cached_folder(root, "key", refusing(root))


def test_a_full_disk_is_an_error_with_path_and_free_space_and_leaves_nothing(tmp_path, temporary):
    with pytest.raises(DataError, match="No space left on device") as caught:
        cached_folder(tmp_path / "cache", "key", refusing(tmp_path))
    for part in (str(tmp_path / "cache" / "key"), "MiB are free", "data.cache_dir="):
        assert part in str(caught.value)
    assert visible(tmp_path / "cache") == visible(next(temporary.iterdir())) == []


def test_a_write_that_the_system_refuses_is_an_error_and_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DataError, match="File too large"):
            cached_folder(tmp_path / "cache", "key", lambda folder: (folder / "big").write_bytes(bytes(5000)) and None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert visible(tmp_path / "cache") == []


def test_a_cache_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=f"{tmp_path}/file/cache/key.*data.cache_dir="):
        cached_folder(tmp_path / "file" / "cache", "key", build_whole)


def test_waiting_says_what_for_and_ends_with_an_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache, "_WARN_AFTER_S", 0.1)
    with caplog.at_level(logging.WARNING), file_lock(tmp_path / "lock", "nobody", timeout_s=0):
        with pytest.raises(DataError, match=f"another builder, which holds the lock {tmp_path}/lock"):
            with file_lock(tmp_path / "lock", "another builder", timeout_s=0.4):
                pytest.fail("two hold the lock")
    assert "waiting for another builder" in caplog.text


def test_the_default_is_the_users_cache_folder_or_else_the_temporary_one(tmp_path, temporary, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "one-word-parallel"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert temporary in cached_folder(None, "key", build_whole).parents
    assert str(tmp_path / "file") in caplog.text
