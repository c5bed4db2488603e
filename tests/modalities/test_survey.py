"""What `mmspec doctor --all` measures: a few classes always, all of them in the slow suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspec.modalities.vlm import survey

TABLE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("LlamaForCausalLM", "accepted"),
        ("T5ForConditionalGeneration", "chain only"),
        ("RwkvForCausalLM", "refused"),
    ],
)
def test_a_class_does_what_the_table_says(name: str, verdict: str) -> None:
    line = survey.look(name, survey.classes()[name])
    assert line.verdict == verdict
    assert f"| {name} | {line.asked} | {verdict} |" in TABLE.read_text()


@pytest.mark.slow
def test_the_table_is_what_is_measured() -> None:
    found = {line.name: line.verdict for line in survey.survey()}
    assert not [name for name, verdict in found.items() if verdict in ("wrong", "crash")]
    rows = [row.split(" | ") for row in TABLE.read_text().splitlines() if row.startswith("| ")]
    told = {row[0].removeprefix("| "): row[2] for row in rows[2:]}
    asked = {name: verdict for name, verdict in found.items() if verdict != "not asked"}
    assert told == asked
