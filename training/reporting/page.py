"""HTML pages of one file: a sweep's report, a certificate and a comparison share a layout, page.html.jinja."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import template


def render(path: Path, about: Mapping[str, Any] | None, **shown: Any) -> str:
    """Return the text of a page that opens offline and runs no script.

    Args:
        path: The page's own template, which extends ``layout`` and fills in its blocks ``title`` and ``content``.
        about: Commit, versions and machine, as ``training.reporting.describe`` returns them; None if unknown.
        **shown: Further variables of the template. Their values are escaped.
    """
    layout = template(Path(__file__).with_name("page.html.jinja"), html=True)
    return template(path, html=True).render(layout=layout, about=about, **shown)
