"""Tables of the site are sorted by a click or Enter on the head of a column, in a browser."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((found for name in NAMES if (found := shutil.which(name))), None)
SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "assets" / "sort.js"
ROWS = [  # recipe, speed, error; digits within a name are no numbers
    ("eagle-3", "2.94x", "0.70 ± 0.1"),
    ("ugsd", "10.5x", ""),
    ("eagle-10", "1,200", "-"),
    ("plain", "0.96x", "\u22120.20"),
    ("coupled", "1 to 3", "0.31"),
]


@pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")
def test_columns_are_sorted_by_numbers_or_names_with_empty_cells_last() -> None:
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in ROWS)
    heads = "<tr><th>recipe</th><th>speed</th><th>error</th></tr>"
    table = f"<table><thead>{heads}</thead><tbody>{rows}</tbody></table>"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_content(f'<div class="md-typeset">{table}</div>')
        page.add_script_tag(content=SCRIPT.read_text(encoding="utf-8"))

        def column() -> list[Any]:
            cells = page.locator("tbody td:first-child")
            return [str(text) for text in cells.all_inner_texts()]

        speed, recipe, error = (
            page.locator("th", has_text=one) for one in ("speed", "recipe", "error")
        )
        speed.click()
        assert column() == ["plain", "coupled", "eagle-3", "ugsd", "eagle-10"]
        assert speed.get_attribute("aria-sort") == "ascending"
        speed.press("Enter")
        assert column() == ["eagle-10", "ugsd", "eagle-3", "coupled", "plain"]
        recipe.click()
        assert column() == ["coupled", "eagle-3", "eagle-10", "plain", "ugsd"]
        assert speed.get_attribute("aria-sort") == "none"
        error.click()
        assert column()[:3] == ["plain", "coupled", "eagle-3"]
        assert set(column()[3:]) == {"ugsd", "eagle-10"}
        error.click()
        assert column()[:3] == ["eagle-3", "coupled", "plain"]
        assert set(column()[3:]) == {"ugsd", "eagle-10"}
        browser.close()
