"""What only the workers can find out ends the run with exit code 1, its numbers and advice (signals: test_ends)."""

import re

import numpy as np
import pytest
from commandline import train


def exploding(folder):
    words = ["parallel=pipelined", "train.epochs=null", "train.steps=50", "optim.lr=1e30", "train.max_skipped=3"]
    return words, r"not finite for 4 steps in a row \(train.max_skipped=3\).*optim.lr"


def corrupt_row(folder):
    """Of more than a million rows 10,000 are looked at beforehand: here every other one is corrupt but those."""
    good, bad = b'{"text": "a"}\n', b'{"text: "a"}!\n'
    lines = np.tile(np.frombuffer(good, np.uint8), (1_000_001, 1))
    corrupt = np.setdiff1d(np.arange(1, len(lines), 2), np.linspace(0, len(lines) - 1, 10_000, dtype=np.int64))
    lines[corrupt] = np.frombuffer(bad, np.uint8)
    path = folder / "rows.jsonl"
    path.write_bytes(lines.tobytes())
    words = ["model=gpt2", "model.size=tiny", "data=jsonl", f"data.root={path}", f"data.cache_dir={folder}/cache"]
    more = ["data.seq_len=8", "train.global_batch_size=32", "parallel=ddp"]
    return [*words, *more], rf"{path} line \d+: not JSON .* Correct the line"


@pytest.mark.parametrize("cause", [exploding, corrupt_row])
def test_what_only_the_workers_can_find_out_ends_the_run_with_its_numbers_and_advice(tmp_path, cause):
    words, says = cause(tmp_path)
    run = train([*words, "logger=none", "device=cpu"], tmp_path / "run")
    assert run.code == 1, run.console
    assert re.search(says, run.stderr.strip().splitlines()[-1]), run.stderr
    assert not (run.folder / "summary.json").exists()
