"""docs/start.ipynb as committed, with fewer steps, in a real kernel."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "start.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def environment() -> dict[str, str]:
    """Without PYTHONPATH, which a hosted notebook lacks, and without the variable by which a kernel knows pytest."""
    own = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    return {name: v for name, v in os.environ.items() if name not in ("PYTEST_CURRENT_TEST", "PYTHONPATH")} | own


def test_the_notebook_is_committed_without_outputs():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)


def test_the_first_cell_clones_and_installs_outside_the_repository(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone of git")
    cell, replaced = re.subn(r'(?m)^REPOSITORY = "".*$', f"REPOSITORY = {str(ROOT)!r}", "".join(CELLS[0]["source"]))
    assert replaced == 1
    script = f"{cell}\nimport training\nprint(Path(training.__file__).parents[1], Path.cwd())"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=250
    )
    clone = (tmp_path / "one-word-parallel").resolve()
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"{clone} {clone}", done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_notebook_runs_and_its_layouts_have_the_same_losses(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    outputs = f'COMMON = ["hydra.run.dir={tmp_path}/' + '${run_id:}", '
    for cell in notebook.cells:
        cell.source = cell.source.replace("STEPS = 60", "STEPS = 6").replace("COMMON = [", outputs)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    client.execute(env=environment())
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in code]
    differences = re.findall(r"largest difference from single (\S+)", said[2])
    assert len(differences) == 4 and all(float(difference) < 1e-5 for difference in differences), said[2]
    pictures = [any("image/png" in output.get("data", {}) for output in cell.outputs) for cell in code]
    assert pictures == [False, False, True, True, False, False, False]
    assert "layouts hold" in said[5] and "draws from numpy's generator" in said[6]
