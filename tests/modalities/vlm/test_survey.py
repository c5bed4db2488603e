"""The survey of `mmspec doctor --all`: a few classes; all of them in the slow suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmspec import registry
from mmspec.modalities.vlm import survey
from tests.cli.running import run

TABLE = Path(__file__).resolve().parents[3] / "docs" / "models.md"


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        pytest.param("LlamaForCausalLM", "accepted", marks=pytest.mark.exhaustive),
        ("T5ForConditionalGeneration", "chain only"),
        ("MllamaForConditionalGeneration", "accepted"),  # a picture, by cross-attention
        ("RwkvForCausalLM", "refused"),
        ("JanusForConditionalGeneration", "refused"),  # its generate() is generate_images() here
        pytest.param(  # a language model beside one of frames
            "MoshiForCausalLM", "accepted", marks=pytest.mark.exhaustive
        ),
        pytest.param(  # its padded rows get no positions
            "VibeVoiceAsrForConditionalGeneration", "chain only", marks=pytest.mark.exhaustive
        ),
        pytest.param(  # it drops those it is given
            "Kosmos2_5ForConditionalGeneration", "chain only", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_class_has_the_verdict_of_the_table(name: str, verdict: str) -> None:
    line = survey.measure_class(name, survey.classes()[name])
    assert line.verdict == verdict
    assert f"| {name} | {line.asked} | {verdict} |" in TABLE.read_text()


def test_a_class_with_an_exact_chain_is_read_in_few_calls() -> None:
    """A copy drafter: the first token is the prompt's, and each call gives four and one more."""
    line = survey.measure_class("FalconH1ForCausalLM", "CAUSAL_LM")
    assert (line.chain, line.ragged, line.seeded) == ("exact",) * 3
    assert (line.read, line.calls) == ("own steps", survey.MIN_CALLS)


def test_what_classes_print_is_not_part_of_the_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def print_and_measure() -> Iterator[survey.Line]:
        print("Warning: what the Reformer prints")  # noqa: T201
        yield survey.Line("ReformerModelWithLMHead", "CAUSAL_LM", reason="as an example")

    one = SimpleNamespace(survey=print_and_measure)
    monkeypatch.setattr(registry, "surveys", lambda modality: [one])
    (line,) = run(capsys, "doctor", "--all")
    assert line["verdict"] == "not asked"


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
