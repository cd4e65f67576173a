"""metrics.jsonl and summary.json: valid at every moment, whatever the disk does; and what is recorded of code and
machine, and what must not be."""

import json
import logging
import os
import platform
import resource
import subprocess
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from conf.masking import mask_secrets
from training.reporting import describe
from training.reporting.environment import git_state
from training.reporting.metrics import MetricsFile, truncate_after, write_json


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


WRITTEN = [
    ({"loss": float("nan"), "grad_norm": float("inf"), "more": [float("-inf")]},
     {"loss": None, "grad_norm": None, "more": [None]}),
    ({"loss": torch.tensor(0.5), "lr": np.float32(0.25), "steps": np.int64(3)},
     {"loss": 0.5, "lr": 0.25, "steps": 3}),
]  # fmt: skip


@pytest.mark.parametrize("record, written", WRITTEN)
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
    truncate_after(path, 2)
    assert records(path) == [{"step": 1}]


def test_an_unwritable_path_does_not_raise(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    file = MetricsFile(tmp_path / "file" / "metrics.jsonl")
    file.write({"step": 1})
    file.close()
    assert "cannot write" in caplog.text and "1 records could not be written before the run ended" in caplog.text


def test_resuming_at_a_step_drops_the_records_behind_it(path):
    truncate_after(path, 3)
    assert not path.exists(), "nothing has been recorded yet"
    file = MetricsFile(path)
    for step in range(1, 6):
        file.write({"step": step, "loss": 0.5})
        if step == 3:
            file.write({"step": 3, "val_loss": 0.4})
    truncate_after(path, 3)
    file.write({"step": 4, "loss": 0.25})
    assert [record["step"] for record in records(path)] == [1, 2, 3, 3, 4]
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def test_a_json_file_is_replaced_whole_or_not_at_all(tmp_path, disk, caplog):
    path = tmp_path / "summary.json"
    write_json(path, {"loss": float("nan"), "steps": 1})
    assert json.loads(path.read_text()) == {"loss": None, "steps": 1}
    with disk(5):
        write_json(path, {"steps": 2})
    assert json.loads(path.read_text())["steps"] == 1
    assert os.listdir(tmp_path) == ["summary.json"]
    assert "File too large" in caplog.text and str(path) in caplog.text


# -- code and machine --------------------------------------------------------------------------------------------------


def test_the_description_names_code_machine_and_packages_and_neither_environment_nor_host(monkeypatch):
    monkeypatch.setenv("SOME_VARIABLE", "a-value-to-look-for")
    text = json.dumps(describe(["train.py", "model=gpt2"]))
    found = json.loads(text)
    assert found["python"] == platform.python_version()
    assert found["cpu"]["cores"] >= 1 and found["memory_bytes"] > 1e8
    assert found["command"] == ["train.py", "model=gpt2"]
    assert "torch" in found["packages"] and isinstance(found["gpus"], list)
    assert "a-value-to-look-for" not in text and "host" not in text and "node" not in found


def test_a_commit_is_found_with_its_dirty_flag_and_only_for_files_that_it_holds(tmp_path):
    if subprocess.run(["git", "--version"], capture_output=True).returncode:
        pytest.skip("needs the command git, whose commit is looked up")
    assert git_state(tmp_path / "code.py") == (None, None)

    def git(*command):
        subprocess.run(
            ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *command],
            check=True,
            capture_output=True,
        )

    git("init")
    (tmp_path / "code.py").write_text("1\n")
    assert git_state(tmp_path / "code.py") == (None, None)
    git("add", ".")
    git("commit", "-m", "first")
    commit, dirty = git_state(tmp_path / "code.py")
    assert len(commit) == 40 and dirty is False
    (tmp_path / "code.py").write_text("2\n")
    assert git_state(tmp_path / "code.py") == (commit, True)


def test_a_machine_without_git_is_described_all_the_same(monkeypatch):
    monkeypatch.setitem(os.environ, "PATH", "")
    assert describe(["train.py"])["git_commit"] is None


def test_secrets_on_the_command_line_are_masked_and_ordinary_arguments_left_alone():
    masked = {
        "logger.api_key=0123abcd": "logger.api_key=***",
        "--token=0123abcd": "--token=***",
        "+parallel.env.WANDB_API_KEY=0123abcd": "+parallel.env.WANDB_API_KEY=***",
        "parallel.env={HF_TOKEN:0123abcd,THREADS:2}": "parallel.env={HF_TOKEN:***,THREADS:2}",
        "db.password='a b'": "db.password=***",
        "data.root=https://me:pass1@host/x": "data.root=https://me:***@host/x",
    }
    ordinary = [
        "data=tokens", "data.max_tokens=100000", "data.pad_token=50256", "optim.lr=1e-3", "tokenizer=gpt2",
        "parallel.balance=[7,7]", "logger.tags=[a,b]",
    ]  # fmt: skip
    assert {given: mask_secrets([given])[0] for given in masked} == masked
    assert mask_secrets(ordinary) == ordinary


def test_secrets_in_a_configuration_are_masked_at_any_depth():
    plain = {"tokens": [1, 2], "tiktoken": "0.12.0"}
    config = {"env": {"HF_TOKEN": "0123abcd", "THREADS": 2}, "list": [{"secret": "s"}], **plain}
    assert mask_secrets(config) == {"env": {"HF_TOKEN": "***", "THREADS": 2}, "list": [{"secret": "***"}], **plain}


def test_secrets_are_masked_where_python_would_escape_what_is_around_or_in_them(monkeypatch):
    monkeypatch.setenv("SERVICE_PASSWORD", "back\\slash'quote")
    config = {"sample": {"prompt": "first\ntoken=0123abcd", "names": ["a", "is back\\slash'quote"]}}
    assert mask_secrets(config) == {"sample": {"prompt": "first\ntoken=***", "names": ["a", "is ***"]}}
