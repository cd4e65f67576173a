"""The site of docs/, which CI builds strictly: a dead link or a missing anchor fails."""

import shutil

import pytest
from interpreters import ROOT, python

pytest.importorskip("material", reason="needs mkdocs-material: pip install -r requirements-docs.txt")


def test_a_dead_link_a_missing_anchor_and_a_forgotten_page_are_refused(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs" / "forgotten.md").write_text("# Page\n\n[a](gone.md) [b](options.md#gone) [c](../gone.py)\n")
    (tmp_path / "SECURITY.md").write_text("# Security\n\n[d](docs/options.md#gone-too)\n")
    done = python("-m", "mkdocs", "build", "--strict", cwd=tmp_path, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 1
    for named in ("'gone.md'", "'options.md#gone'", "'../gone.py'", "#gone-too'", "  - forgotten.md"):
        assert named in done.stderr, done.stderr
