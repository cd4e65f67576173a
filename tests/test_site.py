"""The site of docs/: it is built strictly, so a dead link or a missing anchor fails."""

import shutil
from pathlib import Path

import pytest
from interpreters import ROOT, python

pytest.importorskip("material", reason="needs mkdocs-material: pip install -r requirements-docs.txt")


def build(folder: Path, site: Path):
    return python("-m", "mkdocs", "build", "--strict", "--site-dir", site, cwd=folder, NO_MKDOCS_2_WARNING="1")


def test_every_page_is_in_the_menu_and_every_link_leads_somewhere(tmp_path):
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    options = (tmp_path / "site" / "options" / "index.html").read_text()
    assert 'href="../repository/SECURITY/"' in options and (tmp_path / "site/repository/SECURITY/index.html").exists()


def test_a_dead_link_a_missing_anchor_and_a_forgotten_page_are_refused(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "docs" / "forgotten.md").write_text("# Page\n\n[a](gone.md) [b](options.md#gone) [c](../gone.py)\n")
    (tmp_path / "SECURITY.md").write_text("# Security\n\n[d](docs/options.md#gone-too)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for named in ("'gone.md'", "'options.md#gone'", "'../gone.py'", "#gone-too'", "  - forgotten.md"):
        assert named in done.stderr, done.stderr
