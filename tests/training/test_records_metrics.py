"""metrics.jsonl and summary.json: valid at every moment, whatever the disk does."""

import json
import logging
import os
import resource
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from training.reporting import MetricsFile, write_json


def records(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


@pytest.fixture
def disk():
    """``with disk(size):`` no file grows beyond so many bytes, as on a full disk: half a line may still fit."""

    @contextmanager
    def full(size):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full


def test_every_write_can_be_read_at_once_as_one_json_object_per_line(path):
    file = MetricsFile(path)
    for step in range(1, 4):
        file.write({"step": step, "loss": 1 / step})
        assert [record["step"] for record in records(path)] == list(range(1, step + 1))
    file.close()
    assert records(path)[2] == {"step": 3, "loss": 1 / 3}


@pytest.mark.parametrize(
    "record, written",
    [
        ({"loss": float("nan"), "grad_norm": float("inf"), "more": [float("-inf")]},
         {"loss": None, "grad_norm": None, "more": [None]}),
        ({"loss": torch.tensor(0.5), "lr": np.float32(0.25), "steps": np.int64(3)},
         {"loss": 0.5, "lr": 0.25, "steps": 3}),
    ],
)  # fmt: skip
def test_tensors_are_written_as_numbers_and_what_json_cannot_hold_as_null(path, record, written):
    MetricsFile(path).write(record)
    assert records(path) == [written]


def test_a_full_disk_is_warned_about_once_and_made_good_when_there_is_space_again(path, disk, caplog):
    caplog.set_level(logging.WARNING, logger="training")
    file = MetricsFile(path)
    file.write({"step": 1})
    with disk(17):  # half a line still fits
        for step in (2, 3, 4):
            file.write({"step": step})
            assert records(path) == [{"step": 1}]
    assert len(caplog.records) == 1
    assert str(path) in caplog.text and "MiB are free" in caplog.text and "File too large" in caplog.text
    file.write({"step": 5})
    assert [record["step"] for record in records(path)] == [1, 2, 3, 4, 5]
    assert "3 records of the outage were added" in caplog.text
    with disk(60):
        file.write({"step": 6})
    assert len(caplog.records) == 3, "a second outage is a new warning"


def test_a_line_that_a_killed_process_left_half_written_is_cut_off(path):
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    MetricsFile(path).write({"step": 2})
    assert records(path) == [{"step": 1}, {"step": 2}]


def test_an_unwritable_path_does_not_raise(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    file = MetricsFile(tmp_path / "file" / "metrics.jsonl")
    file.write({"step": 1})
    file.close()
    assert "cannot write" in caplog.text and "lacks 1 records" in caplog.text


def test_resuming_at_a_step_drops_the_records_behind_it(path):
    file = MetricsFile(path)
    file.truncate_after(3)
    assert not path.exists(), "nothing has been recorded yet"
    for step in range(1, 6):
        file.write({"step": step, "loss": 0.5})
        if step == 3:
            file.write({"step": 3, "val_loss": 0.4})
    file.truncate_after(3)
    file.write({"step": 4, "loss": 0.25})
    assert [record["step"] for record in records(path)] == [1, 2, 3, 3, 4]
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def test_a_json_file_is_replaced_whole_or_not_at_all(tmp_path, disk, caplog):
    path = tmp_path / "summary.json"
    assert write_json(path, {"loss": float("nan"), "steps": 1}) is True
    assert json.loads(path.read_text()) == {"loss": None, "steps": 1}
    with disk(5):
        assert write_json(path, {"steps": 2}) is False
    assert json.loads(path.read_text())["steps"] == 1
    assert os.listdir(tmp_path) == ["summary.json"]
    assert "File too large" in caplog.text and str(path) in caplog.text


def test_secrets_are_masked_in_every_json_file(tmp_path):
    write_json(tmp_path / "job.json", {"overrides": ["model=toy", "+logger.api_key=0123abcd"], "steps": 2})
    assert json.loads((tmp_path / "job.json").read_text()) == {
        "overrides": ["model=toy", "+logger.api_key=***"],
        "steps": 2,
    }
