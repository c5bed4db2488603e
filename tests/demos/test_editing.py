"""`demos/editing.py` on the bundled models: an unedited text is accepted whole, others resume."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import zoo
from mmspec.drafters.lookup.given_text import DRAFT
from mmspec.zoo import language

DEMO = Path(__file__).parents[2] / "demos" / "editing.py"
ROOM = 20


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return runpy.run_path(str(DEMO))


def test_recoloured_things_keep_their_places(demo: dict[str, Any]) -> None:
    for example in language.examples(12, "held-out", 0):
        count = min(2, len(example.scene.things))
        scene = demo["recolour"](example.scene, count)
        pairs = list(zip(example.scene.things, scene.things, strict=True))
        assert [one.colour != new.colour for one, new in pairs] == [
            at < count for at in range(len(pairs))
        ]
        assert all((one.name, one.place) == (new.name, new.place) for one, new in pairs)
        assert len({(one.colour, one.name) for one in scene.things}) == len(pairs)


@pytest.mark.exhaustive
@pytest.mark.skipif(not zoo.is_present("llava"), reason="the zoo is not trained")
def test_the_old_text_is_the_draft(demo: dict[str, Any]) -> None:
    processor, fast = zoo.processor("llava"), mmspec.accelerate(zoo.load("llava"), "hsd")
    found = language.examples(20, "held-out", 0, kind="caption")
    example = [one for one in found if len(one.scene.things) >= 3][:1]
    same, other = (
        demo["compare"]({"hsd": fast}, processor, example, edits, ROOM)["hsd"] for edits in (0, 3)
    )
    assert same.changed == 0
    assert same.calls == -(-(same.tokens - 1) // 17)  # drafts of 16 and the target's token
    assert 0 < other.changed < other.tokens
    assert same.calls < other.calls < other.tokens


@pytest.mark.exhaustive
@pytest.mark.skipif(not zoo.is_present("llava"), reason="the zoo is not trained")
def test_a_text_of_another_is_found_out(
    demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, fast = zoo.processor("llava"), mmspec.accelerate(zoo.load("llava"), "hsd")
    example = language.examples(1, "held-out", 0, kind="caption")
    own = fast.generate

    def copied(**given: Any) -> Any:
        out = own(**given)
        prompt = given["input_ids"].shape[1]
        old = torch.tensor(given["drafter_inputs"][DRAFT])[:, : out.sequences.shape[1] - prompt]
        out.sequences[:, prompt : prompt + old.shape[1]] = old
        return out

    monkeypatch.setattr(fast, "generate", copied)
    with pytest.raises(ValueError, match="not that of plain decoding"):
        demo["compare"]({"hsd": fast}, processor, example, 1, ROOM)


@pytest.mark.slow
@pytest.mark.skipif(not zoo.is_present("llava"), reason="the zoo is not trained")
def test_fewer_edits_are_faster(demo: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    demo["main"](model="llava", scenes=2, max_new_tokens=64, seed=0)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rates = [float(line[-1]) for line in lines if line[:1] and line[0].isdigit()]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 3 * rates[-1]
