"""Pages link to files outside docs/ as on a code host: the site gets these files, and the links lead to them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_TEXTS = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sbatch": "bash", ".txt": "text", "": "text"}
_BADGE = re.compile(r"^\[!\[.*\]\(\.\./\.\./actions/.*\)\n", flags=re.MULTILINE)  # for a code host
_LINK = re.compile(r"(?<=\]\()[^)#:\s]+(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the files outside docs/ that pages link to, and those that these link to."""
    pages = list(files.documentation_pages())
    for page in pages:  # grows
        for path in _targets(page):
            uri = _uri(path, config)
            if files.get_file_from_path(uri) is None:
                files.append(_file(path, uri, config))
                pages.append(files.get_file_from_path(uri))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write the links to existing files as paths in the site, and leave out the badge of CI."""

    def changed(link: re.Match) -> str:
        path = _target(page.file, link[0])
        return link[0] if path is None else os.path.relpath(_uri(path, config), Path(page.file.src_uri).parent)

    return _LINK.sub(changed, _BADGE.sub("", markdown))


def _file(path: Path, uri: str, config: MkDocsConfig) -> File:
    """Return a text as a page that shows it, and another file, such as a page or an image, as it is."""
    if path.suffix not in _TEXTS:
        return File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
    text = f"# {path.relative_to(_ROOT)}\n\n```{_TEXTS[path.suffix]}\n{path.read_text()}\n```\n"
    return File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def _targets(page: File) -> Iterator[Path]:
    """Yield the files that a page links to."""
    if page.is_documentation_page():
        found = (_target(page, link) for link in _LINK.findall(page.content_string))
        yield from (path for path in found if path is not None)


def _target(page: File, link: str) -> Path | None:
    """Return the file of this repository that a relative link of a page leads to, if it exists."""
    if page.abs_src_path is None:
        return None
    path = Path(os.path.normpath(Path(page.abs_src_path).parent / link))
    return path if path.is_relative_to(_ROOT) and path.is_file() else None


def _uri(path: Path, config: MkDocsConfig) -> str:
    """Return the path of a file in the site's sources: in docs/ its own, else under repository/."""
    if path.is_relative_to(config.docs_dir):
        return path.relative_to(config.docs_dir).as_posix()
    uri = Path("repository") / path.relative_to(_ROOT)
    return (uri.with_name(f"{uri.name}.md") if path.suffix in _TEXTS else uri).as_posix()
