"""docs/python.md as written, as a script and as a notebook in a real kernel; and the README's own model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


BLOCKS = code_blocks("docs/python.md")


def environment() -> dict[str, str]:
    """Without pytest's own variable: a kernel that sees it leaves the output of its processes alone."""
    own = {"PYTHONPATH": str(ROOT), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"} | own


@pytest.mark.slow  # the notebook runs the same cells
def test_the_page_runs_as_a_script(tmp_path):
    assert len(BLOCKS) == 5
    (tmp_path / "page.py").write_text("\n".join(BLOCKS))
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("outputs/*/*/summary.json"))) == 4
    (accuracy,) = [line for line in done.stdout.splitlines() if re.fullmatch(r"[01]\.\d+", line)]
    assert float(accuracy) > 0.8


@pytest.mark.slow
def test_the_readme_s_own_model_trains_and_is_the_same_in_every_layout(tmp_path):
    (block,) = code_blocks("README.md")
    (tmp_path / "mine.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=290
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pipe_ddp: 4 processes" in done.stdout and done.stdout.splitlines()[-2] == "15 of 15 layouts hold"


def test_the_page_on_own_models_begins_with_the_readme_s_own_model():
    assert code_blocks("docs/own_model.md")[0] == code_blocks("README.md")[0]


@pytest.mark.slow
def test_a_notebook_trains_on_workers_and_shows_what_they_say(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    cells = [nbformat.v4.new_code_cell(block) for block in BLOCKS[:4]]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment())
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "ddp: 2 processes" in said and "pipe_ddp: 4 processes" in said
    assert "the model is one layer" in said
    assert "trained 20 steps" in said, "by rank 0, which is another process than the kernel"
    assert len(list(tmp_path.glob("outputs/*/*/summary.json"))) == 3
