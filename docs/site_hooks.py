"""Hooks of `make docs-site`: pages from outside of docs/, API pages, and links into the repository.

A page of docs/ links to `../tests/laws` as a reader of the repository needs it. In the site such a
link leads to the file at the address `extra.repository` of mkdocs.yml, or, without one, to the
checkout that site/ lies in. MkDocs checks the links between pages; links to files are checked here.
"""

import logging
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_FILE = "repository-file:"  # marks links that MkDocs need not check
_LOG = logging.getLogger("mkdocs.hooks")  # a warning is an error under `strict`


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not lie in docs/."""
    from mkdocs.structure.files import File

    for source, page in config.extra["pages"].items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    for page, modules in config.extra["api"].items():
        text = "\n\n".join([f"# API: {page}", *(f"::: {module}" for module in modules)])
        files.append(File.generated(config, f"api/{page}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite the links of a page."""
    pages = config.extra["pages"]
    sources = {name: source for source, name in pages.items()}
    at = page.file.src_uri
    return (
        markdown
        if at.startswith("api/")
        else relinked(markdown, sources.get(at, f"docs/{at}"), pages)
    )


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Let links to files of the repository lead there."""
    checkout = posixpath.relpath(".", posixpath.dirname(f"site/{page.file.dest_uri}"))
    return html.replace(f'"{_FILE}', f'"{config.extra["repository"] or checkout}/')


def relinked(markdown: str, source: str, pages: Mapping[str, str]) -> str:
    """Return the text of the file `source` with its links as pages of the site need them."""

    def replace(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        anchor = match[2] or ""
        if not (ROOT / target).exists():
            _LOG.warning("%s links to %s, which does not exist", source, match[1])
        if target in pages:
            return f"]({pages[target]}{anchor})"
        if target.startswith("docs/"):
            return f"]({target.removeprefix('docs/')}{anchor})"
        return f"]({_FILE}{target}{anchor})"

    return _LINK.sub(replace, markdown)
