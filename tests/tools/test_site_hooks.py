"""The site builds without a warning, holds every trace, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
from tools import site_hooks

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {"extra": {"repository": "https://code.example/mmspec"}, "docs_dir": str(ROOT / "docs")}


def test_links_that_leave_the_folder_lead_to_the_repository() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/tests.md"))
    text = "[a](../../CONTRIBUTING.md#set-up) [b](../vlm.md#x) [c](#here) [d](https://a.b/c)"
    made = site_hooks.on_page_markdown(text, page, CONFIG, None)
    home = "https://code.example/mmspec/blob/main/CONTRIBUTING.md#set-up"
    assert made == text.replace("../../CONTRIBUTING.md#set-up", home)


def test_every_trace_and_every_page_is_in_the_navigation() -> None:
    files = {one.stem for one in (ROOT / "docs" / "traces").glob("*.jsonl")}
    assert files == set(site_hooks.TRACES)
    nav = site_hooks.on_config(dict(CONFIG))["nav"]
    listed = {name for group in nav for names in group.values() for name in names}
    docs = ROOT / "docs"
    assert listed - {"gallery.md"} == {
        one.relative_to(docs).as_posix() for one in docs.rglob("*.md")
    }


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^WARNING", done.stderr, re.MULTILINE)
    for name in site_hooks.TRACES:
        assert (tmp_path / "site" / "traces" / f"{name}.html").stat().st_size > 40_000
    home = (tmp_path / "site" / "index.html").read_text()
    assert "traces/text.html#autoplay" in home
    loaded = re.findall(r'<(?:script|link|img|iframe)[^>]* (?:src|href)="(https?:[^"]+)"', home)
    assert [one for one in loaded if "github.com" not in one] == []
