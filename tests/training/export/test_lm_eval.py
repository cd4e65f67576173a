"""The recipe for lm-evaluation-harness in docs/serving.md: its sum of log-likelihoods is the run's own loss."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from commandline import ROOT, train
from hugging_face import make_folder

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install -r requirements-dev.txt")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
_PAGE = (ROOT / "docs" / "serving.md").read_text()
SECTION = _PAGE[_PAGE.index("## Evaluate with lm-evaluation-harness") : _PAGE.index("## Sampling")]
BLOCKS = dict(re.findall(r"```(\w+)\n(.*?)```", SECTION, flags=re.DOTALL))
TRAIN, EXPORT, EVALUATE = (
    shlex.split(line) for line in re.findall(r"^ {4}(?:python train.py|lm_eval) (.*)", SECTION, re.M)
)
# Where torchvision does not fit a CPU torch, transformers fails without the first line.
PROGRAM = "from common.packages import load_torchvision; load_torchvision()\n"
EVALUATION = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"


def test_the_sum_of_log_likelihoods_is_the_loss_of_the_run(rows, tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "answers.yaml").write_text(BLOCKS["yaml"])
    (tmp_path / "answer.jinja").write_text(BLOCKS["jinja"].removesuffix("\n"))
    make_folder(tmp_path / "FOLDER")
    (tmp_path / "ROWS").symlink_to(rows)
    few = ["train.steps=3", "train.epochs=null", "optim.lr=1e-2", "data.seq_len=128", "data.cache_dir=cache"]
    few += ["device=cpu", "logger=none"]
    for words in ([*TRAIN, *few], [*EXPORT, "device=cpu"]):
        done = train(words, tmp_path / "console", cwd=tmp_path, own_folder=False)
        assert done.code == 0, done.console
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    printed = ""
    for program in (PROGRAM + EVALUATION, PROGRAM + BLOCKS["python"]):
        words = [*EVALUATE, "--device", "cpu"] if program.endswith(EVALUATION) else []
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    of_harness, of_run = map(float, printed.split()[-2:])
    assert of_harness == pytest.approx(of_run, rel=1e-6) and of_run > 1
