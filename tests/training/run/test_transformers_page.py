"""docs/transformers.md as it stands, with a tiny random Gemma 2 in the place of FOLDER."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from commandline import ROOT, train
from hugging_face import make_folder, write_rows

pytest.importorskip("transformers", reason="transformers is a test dependency (requirements-dev.txt)")


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(tmp_path):
    folder, rows = make_folder(tmp_path / "published", "Gemma2", head_dim=12), write_rows(tmp_path / "rows")
    page = (ROOT / "docs" / "transformers.md").read_text()
    for word, place in (("FOLDER", folder), ("ROWS", rows), ("runs/", f"{tmp_path}/runs/")):
        page = page.replace(f"={word}", f"={place}")
    commands = re.findall(r"^    python train.py (.*)$", page, flags=re.M)
    assert len(commands) == 6
    (tmp_path / "runs").mkdir()
    short = ["train.epochs=null", "train.steps=2", "train.global_batch_size=8", "train.eval_every=null"]
    for number, command in enumerate(commands):
        line, where = shlex.split(command), tmp_path / "runs" / str(number)
        if line[-1].startswith("hydra.run.dir="):
            where = Path(line.pop().partition("=")[2])
        line += [] if "checkpoint=" in command else [*short, f"data.cache_dir='{tmp_path / 'cache'}'"]
        line += ["data.seq_len=64"] if "data=jsonl" in command else []
        # The logits of 50,257 tokens are 100 MB.
        line += ["model.vocabulary=words", "data.max_vocabulary=416"] if "model.config=" in command else []
        line += ["verify.steps=1"] if "mode=verify" in command else []
        run = train([*line, "device=cpu", "logger=none"], where)
        assert run.code == 0, run.console
