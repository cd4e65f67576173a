"""docs/python.md as written, as a script and as a notebook in a real kernel; and the README's own model."""

import re

import pytest
from interpreters import ROOT, python, run_notebook, text_of


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


BLOCKS = code_blocks("docs/python.md")


WHERE = {"PYTHONPATH": str(ROOT), "PYTEST_CURRENT_TEST": None}


@pytest.mark.slow  # the notebook runs the same cells
def test_the_page_runs_as_a_script(tmp_path):
    assert len(BLOCKS) == 5
    (tmp_path / "page.py").write_text("\n".join(BLOCKS))
    done = python("page.py", cwd=tmp_path, **WHERE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("outputs/*/*/summary.json"))) == 4
    (accuracy,) = [line for line in done.stdout.splitlines() if re.fullmatch(r"[01]\.\d+", line)]
    assert float(accuracy) > 0.8


@pytest.mark.slow
def test_the_readme_s_own_model_trains_and_is_the_same_in_every_layout(tmp_path):
    (block,) = code_blocks("README.md")
    (tmp_path / "mine.py").write_text(block)
    done = python("mine.py", cwd=tmp_path, timeout=290, **WHERE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "pipe_ddp: 4 processes" in done.stdout and done.stdout.splitlines()[-2] == "15 of 15 layouts hold"


def test_the_page_on_own_models_begins_with_the_readme_s_own_model():
    assert code_blocks("docs/own_model.md")[0] == code_blocks("README.md")[0]


@pytest.mark.slow
def test_a_notebook_trains_on_workers_and_shows_what_they_say(tmp_path):
    def notebook(nbformat):
        return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(block) for block in BLOCKS[:4]])

    said = "".join(map(text_of, run_notebook(notebook, tmp_path, 200, **WHERE)))
    assert "ddp: 2 processes" in said and "pipe_ddp: 4 processes" in said
    assert "the model is one layer" in said
    assert "trained 20 steps" in said, "by rank 0, which is another process than the kernel"
    assert len(list(tmp_path.glob("outputs/*/*/summary.json"))) == 3
