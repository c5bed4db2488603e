"""Hooks of MkDocs: a class that a page mentions leads to its entry in the reference, by its name.

Methods have headings there, so that the search lists them.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from mkdocs.utils import get_relative_url

PAGES = ("api.md", "reference/api/*.md")  # made by `python -m tools.api_reference`
_ENTRY = re.compile(r"^### (\w+)$", re.MULTILINE)
_METHOD = re.compile(r"^\*\*`(\w+\.\w+)`\*\*$", re.MULTILINE)
_CLOSED = re.compile(r"(<a\b.*?</a>|<h[1-6]\b.*?</h[1-6]>)", re.DOTALL)  # without links inside
_NAME = re.compile(r'(<code>|<span class="n">)([A-Z]\w+)(</code>|</span>)')


def is_reference(page: str) -> bool:
    """Whether a page of docs/ belongs to the API reference."""
    return page == "api.md" or page.startswith("reference/api/")


def find_entries(docs: Path) -> dict[str, str]:
    """The page of every class of the reference; names with entries on several pages have none."""
    found = [
        (name, file.relative_to(docs).as_posix())
        for pattern in PAGES
        for file in sorted(docs.glob(pattern))
        for name in _ENTRY.findall(file.read_text(encoding="utf-8"))
        if name[0].isupper() and "recipes" not in file.stem
    ]
    counted = Counter(name for name, _ in found)
    return {name: page for name, page in found if counted[name] == 1 or page != "api.md"}


def add_anchors(markdown: str) -> str:
    """Entries are found by their names, and methods have headings, which the search lists."""

    def head(match: re.Match[str]) -> str:
        name = match[1]
        shown, anchor = name.replace("__", r"\_\_"), name.replace("__", "")
        return f"#### {shown} {{ #{anchor} }}"

    return _METHOD.sub(head, _ENTRY.sub(r"### \1 { #\1 }", markdown))


def link_names(html: str, links: dict[str, str]) -> str:
    """The page with every known class name as a link; `links` are addresses by name."""

    def link(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        address = links.get(name)
        return match[0] if address is None else f'{start}<a href="{address}">{name}</a>{end}'

    parts = _CLOSED.split(html)
    parts[::2] = [_NAME.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Entries of the reference get anchors."""
    return add_anchors(markdown) if is_reference(page.file.src_uri) else markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Names of classes lead to the reference."""
    links = {}
    for name, source in find_entries(Path(config["docs_dir"])).items():
        file = files.get_file_from_path(source)
        links[name] = f"{get_relative_url(file.url, page.url)}#{name}"
    return link_names(html, links)
