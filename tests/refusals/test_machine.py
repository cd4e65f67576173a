"""A machine, a user or a terminal that lacks something: one line says what, and nothing hangs."""

import pwd
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOY = ["logger=none", "device=cpu", "train.steps=2", "train.epochs=null"]


def command(*overrides, cwd, prefix=(), **options):
    """A new interpreter that runs train.py."""
    words = [*prefix, sys.executable, str(ROOT / "train.py"), *TOY, *overrides]
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=120, **options)


def refused(done):
    """The command's one line of error."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_a_user_without_a_home_folder(tmp_path, monkeypatch, capsys):
    from train import main

    def nobody(*args):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert main(["model=gpt2", "model.size=tiny", "logger=none"]) == 1
    said = capsys.readouterr().err
    assert "HOME is not set" in said and "data.cache_dir=FOLDER" in said
