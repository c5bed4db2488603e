"""The site builds without a warning, holds every trace, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
from mmspec import recipes
from tools import site_hooks

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"extra": {"repository": "https://code.example/mmspec"}, "docs_dir": str(ROOT / "docs")}


def test_links_that_leave_the_folder_lead_to_the_repository() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/tests.md"))
    text = "[a](../../CONTRIBUTING.md#set-up) [b](../vlm.md#x) [c](#here) [d](https://a.b/c)"
    made = site_hooks.on_page_markdown(text, page, CONFIG, None)
    home = "https://code.example/mmspec/blob/main/CONTRIBUTING.md#set-up"
    assert made == text.replace("../../CONTRIBUTING.md#set-up", home)


def test_links_to_notebooks_lead_to_their_pages() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/vlm.md"))
    made = site_hooks.on_page_markdown("[a](../notebooks/vlm.ipynb)", page, CONFIG, None)
    assert made == "[a](../notebooks/vlm.md)"


def test_the_choice_names_recipes_that_exist() -> None:
    text = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    words = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)*)`", text)) - {"memory"}
    assert len(words) > 25
    assert words <= set(recipes.names())
    assert text.count("?") >= 20  # it is made of questions


def test_every_trace_and_every_page_is_in_the_navigation() -> None:
    files = {one.stem for one in (ROOT / "docs" / "traces").glob("*.jsonl")}
    assert files == set(site_hooks.TRACES)
    nav = site_hooks.on_config(dict(CONFIG))["nav"]
    entries = [name for group in nav for names in group.values() for name in names]
    listed = {path for one in entries for path in ([one] if isinstance(one, str) else one.values())}
    docs = ROOT / "docs"
    written = {one.relative_to(docs).as_posix() for one in docs.rglob("*.md")}
    notebooks = {f"notebooks/{one.stem}.md" for one in docs.glob("notebooks/*.ipynb")}
    assert listed == written | notebooks | {"gallery.md"}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^WARNING", done.stderr, re.MULTILINE)
    for name in site_hooks.TRACES:
        assert (tmp_path / "site" / "traces" / f"{name}.html").stat().st_size > 40_000
    for file in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        page = (tmp_path / "site" / "notebooks" / file.stem / "index.html").read_text()
        assert "<iframe srcdoc=" in page
        assert (tmp_path / "site" / "notebooks" / file.name).exists()
    check_names(tmp_path / "site")
    home = (tmp_path / "site" / "index.html").read_text()
    assert "traces/text.html#autoplay" in home
    loaded = re.findall(r'<(?:script|link|img|iframe)[^>]* (?:src|href)="(https?:[^"]+)"', home)
    assert [one for one in loaded if "github.com" not in one] == []


def check_names(site: Path) -> None:
    """Every link to a class of the reference leads to an anchor; the search knows methods."""
    found, pages = 0, dict[Path, str]()
    for file in site.rglob("*.html"):
        text = pages.setdefault(file.resolve(), file.read_text(encoding="utf-8"))
        for address, name in re.findall(r'<a href="([^"]*)#([A-Z]\w*)">\2</a>', text):
            target = (file.parent / address / "index.html").resolve()
            pages.setdefault(target, target.read_text(encoding="utf-8"))
            assert f'id="{name}"' in pages[target], (file, name)
            found += 1
    assert found > 1000
    assert "Draft.chain" in (site / "search" / "search_index.json").read_text()
