"""HTML pages of one file: a sweep's report, a certificate and a comparison share a layout, page.html.jinja."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import template
from training.reporting.metrics import SUMMARY, read_object, write_or_warn

PAGE = "report.html"


def write_page(run_dir: Path) -> None:
    """Write the page of a run, with its results and all pictures (*.png) in its directory, if there is a picture.

    The caption of a picture is the name of its file.
    """
    encoded = {path.stem: b64encode(path.read_bytes()).decode() for path in sorted(run_dir.glob("*.png"))}
    if encoded:
        about = read_object(run_dir / "environment.json")
        shown = {"run_dir": run_dir, "summary": read_object(run_dir / SUMMARY), "pictures": encoded}
        page = render(Path(__file__).with_name("run.html.jinja"), about, command=about.get("command", ()), **shown)
        write_or_warn(run_dir / PAGE, page)


def render(path: Path, about: Mapping[str, Any] | None, **shown: Any) -> str:
    """Return the text of a page that opens offline and runs no script.

    Args:
        path: The page's own template, which extends ``layout`` and fills in its blocks ``title`` and ``content``.
        about: Commit, versions and machine, as ``training.reporting.describe`` returns them; None if unknown.
        **shown: Further variables of the template. Their values are escaped.
    """
    layout = template(Path(__file__).with_name("page.html.jinja"), html=True)
    return template(path, html=True).render(layout=layout, about=about, **shown)
