"""docs/paper.md as written: a study from a folder of the user's own to the table, the weights and the predictions."""

import re
import shlex

import pytest
from interpreters import ROOT, python

PAGE = (ROOT / "docs" / "paper.md").read_text()
CODE = re.findall(r"```(?:python|bash)\n(.*?)```", PAGE, flags=re.DOTALL)
CHECKED = """
import torch
from data.mydigits import mydigits

data = mydigits()
data.prepare()
inputs, targets = data.test.read(np.arange(len(data.test)), 0)
with torch.no_grad():
    same = np.abs(net(inputs).numpy() - outputs).max() < 0.1  # the run rounds to bfloat16 on some machines
print(outputs.shape, same, (outputs.argmax(1) == targets.numpy()).mean())
"""


@pytest.mark.slow
def test_the_study_runs_as_written_in_fewer_than_twenty_lines(tmp_path):
    lines = [line for block in CODE for line in block.splitlines() if line]
    assert len(lines) < 20
    for path, text in re.findall(r"^`(study/[\w/.]+)`:\n\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    folder = tmp_path / "study"
    for command in (line for line in lines if line.startswith("python ")):
        _, program, *words = shlex.split(command)
        assert program == "../train.py"
        done = python(ROOT / "train.py", *words, cwd=folder, PYTEST_CURRENT_TEST=None)
        assert done.returncode == 0, done.stdout + done.stderr
    first, best = re.findall(r"^0\..*", (folder / "sweep" / "sweep.tex").read_text(), flags=re.MULTILINE)
    assert first.startswith("0.1 & 3 & $0.") and best.startswith(r"0.3 & 3 & $\mathbf{0.9")
    (folder / "read.py").write_text(CODE[-1] + CHECKED)
    done = python("read.py", cwd=folder, PYTHONPATH=str(ROOT), PYTEST_CURRENT_TEST=None)
    assert done.returncode == 0, done.stdout + done.stderr
    shape, same, accuracy = re.fullmatch(r"(\(179, 10\)) (\w+) ([\d.]+)", done.stdout.splitlines()[-1]).groups()
    assert shape and same == "True" and float(accuracy) > 0.85
