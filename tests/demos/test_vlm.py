"""`demos/vlm.py` on the bundled models: coloured texts, and a table of draft models."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from mmspec import zoo

DEMO = Path(__file__).parents[2] / "demos" / "vlm.py"


@pytest.mark.exhaustive
@pytest.mark.skipif(not zoo.is_present("llava"), reason="the zoo is not trained")
def test_the_demo_compares_draft_models(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(DEMO))["main"](model="llava", scenes=2, max_new_tokens=8, seed=0)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("the same text") == 2
    for name in ("reads text only", "copies the text so far", "the wrong image"):
        assert name in printed
    assert "ANOTHER" not in printed
