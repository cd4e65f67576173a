"""A disk that fills up is noticed, once each time."""

import errno
import logging
import os
import shutil
from types import SimpleNamespace

import pytest

from common.files import explain
from training.reporting import WandbRun
from training.reporting.disk import DiskWatch


@pytest.fixture
def disk(monkeypatch):
    """``disk.free``: bytes."""
    state = SimpleNamespace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=state.free))
    return state


def test_a_disk_that_fills_up_is_noticed_once_each_time_and_not_looked_at_all_the_time(disk, tmp_path):
    now = [100.0]
    watch = DiskWatch(tmp_path, clock=lambda: now[0])

    def look(after, free):
        now[0] += after
        disk.free = free
        return watch.has_filled()

    assert [look(2, 10**9), look(2, 100), look(2, 100)] == [False, True, False]
    assert [look(2, 10**9), look(0.1, 0), look(2, 0)] == [False, False, True]


def test_an_error_is_told_with_the_space_that_is_left_where_the_file_would_be(disk, tmp_path):
    disk.free = 12_345_678
    told = explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), tmp_path / "no" / "such" / "file")
    assert told == f"No space left on device; 11.8 MiB are free at {tmp_path}"


def test_wandb_that_cannot_start_on_a_full_disk_is_tried_again_later(disk, tmp_path, monkeypatch, caplog):
    started, now = [], [0.0]

    def start(self, mode, what):
        started.append(mode)
        if disk.free == 0:
            raise RuntimeError("it gave no reason")
        return SimpleNamespace(log=lambda *args, **options: None, url=None)

    monkeypatch.setattr(WandbRun, "_start", start)
    monkeypatch.setattr("training.reporting.wandb_run.time.monotonic", lambda: now[0])
    disk.free = 0
    with caplog.at_level(logging.WARNING, logger="training"):
        run = WandbRun(tmp_path / "run", {})
        run.log({"loss": 1.0}, 1)
        assert started == ["offline"] and "could not start" in caplog.text and "0.0 MiB are free" in caplog.text
        now[0] += 61
        run.log({"loss": 1.0}, 2)
        assert len(started) == 2 and caplog.text.count("could not start") == 1
        disk.free = 10**9
        now[0] += 61
        run.log({"loss": 1.0}, 3)
    assert len(started) == 3 and "wandb could start now" in caplog.text
