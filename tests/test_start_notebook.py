"""docs/start.ipynb as committed, with fewer steps, in a real kernel."""

import json
import re

import pytest
from interpreters import ROOT, python, run_notebook, text_of

NOTEBOOK = ROOT / "docs" / "start.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


HOSTED = {"PYTHONPATH": None, "PYTEST_CURRENT_TEST": None}  # a hosted notebook has no path


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
