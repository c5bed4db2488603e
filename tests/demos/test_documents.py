"""`demos/documents.py` on the bundled models: scores are those of single forwards."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec import zoo
from mmspec.zoo import language

DEMO = Path(__file__).parents[2] / "demos" / "documents.py"
pytestmark = pytest.mark.skipif(not zoo.is_present("llava"), reason="the zoo is not trained")


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return runpy.run_path(str(DEMO))


@pytest.mark.exhaustive
def test_one_document_shows_what_is_asked_for(demo: dict[str, Any]) -> None:
    cases = demo["make_cases"](4, 3, 0)
    assert len(cases) == 4
    for at, case in enumerate(cases):
        assert case.documents.index(case.example) == at % 3
        name = case.support.removesuffix("?").split(maxsplit=3)[3]
        shown = [any(t.name == name for t in one.scene.things) for one in case.documents]
        assert shown == [number == at % 3 for number in range(3)]
        assert name in case.question


@pytest.mark.exhaustive
def test_scores_are_those_of_single_forwards(demo: dict[str, Any]) -> None:
    model, processor = zoo.load("llava"), zoo.processor("llava")
    case = demo["make_cases"](1, 2, 0)[0]
    ends = demo["_ends"](model)
    words = processor.tokenizer.convert_tokens_to_ids
    answers = torch.tensor(
        [[words("yes"), words("star"), words("red")], [words("no"), ends[0], words("pink")]]
    )
    prompts = demo["read"](processor, [case.question] * 2, case.documents)
    scores = demo["score_answers"](model, prompts, answers, ends)
    support = demo["read"](processor, [case.support, "which?"], case.documents)  # ragged
    shares = demo["reflect"](model, processor, support)
    for row, length in enumerate((3, 2)):  # the second ends after two
        single = demo["read"](processor, [case.question], case.documents[row : row + 1])
        ids = torch.cat((single["input_ids"], answers[row : row + 1, :length]), 1)
        with torch.no_grad():
            logits = model(input_ids=ids, pixel_values=single["pixel_values"]).logits.double()
        log_probs = logits[0, -length - 1 : -1].log_softmax(-1)
        wanted = log_probs.gather(1, answers[row, :length, None]).mean().exp()
        assert float(scores[row]) == pytest.approx(float(wanted), rel=1e-4)
        question = (case.support, "which?")[row]
        single = demo["read"](processor, [question], case.documents[row : row + 1])
        with torch.no_grad():
            probs = model(**single).logits[0, -1].double().softmax(-1)
        yes, no = float(probs[words("yes")]), float(probs[words("no")])
        assert float(shares[row]) == pytest.approx(yes / (yes + no), rel=1e-3)


@pytest.mark.slow
def test_the_large_model_reads_instead_of_writing(
    demo: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    demo["main"](model="llava", questions=6, documents=3, seed=0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    calls = [int(line[-1]) for line in lines if line[:1] and line[0] in ("small", "large")]
    assert calls[:2] == [0, 2 * 6]
    assert calls[2] > 4 * calls[1]


def test_descriptions_without_the_words_of_a_question_are_far(demo: dict[str, Any]) -> None:
    store = language.examples(6, "held-out", 0, kind="caption")
    query, index = demo["_embed"](store[2].answer, store)
    assert torch.equal(query[0], index[2])
    assert not demo["_embed"]("zebra", store)[0].any()
