"""What `mmspec doctor --all` measures: a few classes always, all of them in the slow suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspec.modalities.vlm import survey

TABLE = Path(__file__).resolve().parents[2] / "docs" / "models.md"


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        pytest.param("LlamaForCausalLM", "accepted", marks=pytest.mark.promise),
        ("T5ForConditionalGeneration", "chain only"),
        ("MllamaForConditionalGeneration", "accepted"),  # a picture, by cross-attention
        ("RwkvForCausalLM", "refused"),
        ("MoshiForCausalLM", "accepted"),  # a language model beside one of frames
        ("VibeVoiceAsrForConditionalGeneration", "chain only"),  # its padded rows get no positions
        pytest.param(  # it drops those it is given
            "Kosmos2_5ForConditionalGeneration", "chain only", marks=pytest.mark.promise
        ),
    ],
)
def test_a_class_does_what_the_table_says(name: str, verdict: str) -> None:
    line = survey.look(name, survey.classes()[name])
    assert line.verdict == verdict
    assert f"| {name} | {line.asked} | {verdict} |" in TABLE.read_text()


def test_a_class_with_an_exact_chain_is_read_in_few_calls() -> None:
    """A copy drafter: the first token is the prompt's, and each call gives four and one more."""
    line = survey.look("FalconH1ForCausalLM", "CAUSAL_LM")
    assert (line.chain, line.ragged, line.seeded) == ("exact",) * 3
    assert (line.read, line.calls) == ("own steps", survey.FEWEST)


@pytest.mark.slow
def test_the_table_is_what_is_measured() -> None:
    lines = list(survey.survey())
    assert not [line.name for line in lines if line.verdict in ("wrong", "crash")]
    measured, told = (rows(text) for text in (survey.markdown(lines), TABLE.read_text()))
    assert measured == told


def rows(text: str) -> list[list[str]]:
    """Class, request, verdict, way and calls of a table; causes may differ by machine."""
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [line[:5] for line in lines[2:]]
