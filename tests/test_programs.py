"""The programs and notebooks of README and docs/, as a script and in a real kernel: docs/python.md as written, the
README's own model, docs/start.ipynb as committed, with fewer steps."""

import json
import os
import re

import pytest
from interpreters import ROOT, python


def code_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


NOTEBOOK = ROOT / "docs" / "start.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
BLOCKS = code_blocks("docs/python.md")


HOSTED = {"PYTHONPATH": None, "PYTEST_CURRENT_TEST": None}  # a hosted notebook has no path
WHERE = {"PYTHONPATH": str(ROOT), "PYTEST_CURRENT_TEST": None}


def run_notebook(notebook, folder, timeout, **env) -> list[list]:
    """The outputs of each cell of code; ``notebook`` makes one by nbformat, or reads it."""
    missing = "needs nbclient and ipykernel: pip install nbclient ipykernel"
    nbformat, nbclient, _ = (
        pytest.importorskip(name, reason=missing) for name in ("nbformat", "nbclient", "ipykernel")
    )
    made = notebook(nbformat)
    # A kernel that sees pytest's own variable leaves the output of its processes alone.
    own = {**os.environ, "PYTEST_CURRENT_TEST": None, "PYDEVD_DISABLE_FILE_VALIDATION": "1", **env}
    client = nbclient.NotebookClient(made, timeout=timeout, resources={"metadata": {"path": str(folder)}})
    client.execute(env={name: value for name, value in own.items() if value is not None})
    return [cell.outputs for cell in made.cells if cell.cell_type == "code"]


def text_of(outputs: list) -> str:
    """What a cell printed."""
    return "".join(output.get("text", "") for output in outputs)


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


def test_the_notebook_is_committed_without_outputs():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)


def test_the_first_cell_clones_and_installs_outside_the_repository(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone of git")
    cell, replaced = re.subn(r'(?m)^REPOSITORY = "".*$', f"REPOSITORY = {str(ROOT)!r}", "".join(CELLS[0]["source"]))
    assert replaced == 1
    script = f"{cell}\nimport training\nprint(Path(training.__file__).parents[1], Path.cwd())"
    done = python("-c", script, cwd=tmp_path, **HOSTED)
    clone = (tmp_path / "one-word-parallel").resolve()
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"{clone} {clone}", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_notebook_runs_and_its_layouts_have_the_same_losses(tmp_path):
    outputs = f'COMMON = ["hydra.run.dir={tmp_path}/' + '${run_id:}", '

    def notebook(nbformat):
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        for cell in notebook.cells:
            cell.source = cell.source.replace("STEPS = 60", "STEPS = 6").replace("COMMON = [", outputs)
        return notebook

    shown = run_notebook(notebook, NOTEBOOK.parent, 600, **HOSTED)
    said = [text_of(outputs) for outputs in shown]
    differences = re.findall(r"largest difference from single (\S+)", said[2])
    assert len(differences) == 4 and all(float(difference) < 1e-5 for difference in differences), said[2]
    pictures = [any("image/png" in output.get("data", {}) for output in outputs) for outputs in shown]
    assert pictures == [False, False, True, True, False, False, False]
    assert "layouts hold" in said[5] and "draws from numpy's generator" in said[6]
