"""Names on the site lead to entries of the reference that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed")
from tools import site_links

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_entries_and_methods_get_anchors() -> None:
    text = "# a\n\n### Draft\n\n`mmspec.draft.Draft`\n\n**`Draft.chain`**\n\n**bold** `x`"
    made = (
        "# a\n\n### Draft { #Draft }\n\n`mmspec.draft.Draft`\n\n#### Draft.chain { #Draft.chain }"
    )
    assert site_links.add_anchors(text) == f"{made}\n\n**bold** `x`"
    special = site_links.add_anchors("**`Accelerated.__call__`**")  # no id has two underscores
    assert special == r"#### Accelerated.\_\_call\_\_ { #Accelerated.call }"


def test_names_become_links_outside_of_links_and_headings() -> None:
    links = {"Draft": "../draft/#Draft"}
    link = '<a href="../draft/#Draft">Draft</a>'
    cases = {
        "<p><code>Draft</code> of</p>": f"<p><code>{link}</code> of</p>",
        '<span class="n">Draft</span>': f'<span class="n">{link}</span>',
        '<span class="nc">Draft</span>': None,  # its own definition
        "<code>Drafts</code>": None,
        '<h3 id="x"><code>Draft</code></h3>': None,
        '<a href="y">see <code>Draft</code></a>': None,
    }
    for given, wanted in cases.items():
        assert site_links.link_names(given, links) == (wanted or given)


def test_classes_of_the_reference_have_one_page_each() -> None:
    entries = site_links.find_entries(DOCS)
    assert len(entries) > 300
    assert entries["Draft"] == "reference/api/mmspec.draft.md"
    assert entries["Trace"] == "api.md"
    assert entries["Recipe"] == "reference/api/mmspec.recipe.md"
    for name, page in entries.items():
        assert f"\n### {name}\n" in (DOCS / page).read_text(encoding="utf-8")
