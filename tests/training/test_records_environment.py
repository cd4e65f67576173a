"""What is recorded about code and machine, and what must not be."""

import json
import os
import platform
import subprocess

import pytest

from conf.masking import mask_secrets
from training.reporting import describe
from training.reporting.recorder import git_state


def test_the_description_is_json_and_names_code_machine_and_packages():
    found = json.loads(json.dumps(describe(["train.py", "model=gpt2"])))
    assert found["python"] == platform.python_version()
    assert found["cpu"]["cores"] >= 1 and found["memory_bytes"] > 1e8
    assert found["command"] == ["train.py", "model=gpt2"]
    assert "torch" in found["packages"] and isinstance(found["gpus"], list)


def test_neither_environment_nor_host_name_is_recorded(monkeypatch):
    monkeypatch.setenv("SOME_VARIABLE", "a-value-to-look-for")
    text = json.dumps(describe(["train.py"]))
    assert "a-value-to-look-for" not in text
    assert "host" not in text and "node" not in describe(["train.py"])


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
        "note=hf_abcdefghijklmnopqrst": "note=***",
        "note=" + "0a" * 20: "note=***",
    }
    ordinary = [
        "data=tokens", "data.max_tokens=100000", "data.pad_token=50256", "optim.lr=1e-3", "tokenizer=gpt2",
        "data.root=/data/" + "0a" * 20 + "/x", "parallel.balance=[7,7]", "logger.tags=[a,b]",
    ]  # fmt: skip
    assert {given: mask_secrets([given])[0] for given in masked} == masked
    assert mask_secrets(ordinary) == ordinary


def test_the_version_of_tiktoken_is_no_secret():
    assert mask_secrets({"tiktoken": "0.12.0", "my_token": "0.12.0"}) == {"tiktoken": "0.12.0", "my_token": "***"}


def test_secrets_in_a_configuration_are_masked_at_any_depth():
    config = {"env": {"HF_TOKEN": "0123abcd", "THREADS": 2}, "tokens": [1, 2], "list": [{"secret": "s"}]}
    assert mask_secrets(config) == {
        "env": {"HF_TOKEN": "***", "THREADS": 2},
        "tokens": [1, 2],
        "list": [{"secret": "***"}],
    }
