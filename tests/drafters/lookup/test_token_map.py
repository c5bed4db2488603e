"""Token maps: correct counts, exact output with any map, and few calls with the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec.drafters.lookup.token_map import TokenMap
from tests import toys
from tests.covering import exhaustive

ROOM = 12
TEXTS = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8], [9, 2, 5]]


def test_the_usual_continuation_is_counted() -> None:
    made = TokenMap.of(TEXTS, longest=2, max_tokens=3, min_count=2, share=0.5)
    assert made.find([1]) == (2, 3, 4)  # three times, three times, twice
    assert made.find([2]) == (3, 4)  # 3 of four, 4 of four in two; 5 once only
    assert made.find([9]) == ()
    assert made.find([0, 1, 2]) == (3, 4)  # the longer key counts
    assert TokenMap.of(TEXTS, share=0.9).find([1]) == (2, 3)
    assert TokenMap.of(TEXTS, max_tokens=1).find([1]) == (2,)
    assert TokenMap.of(TEXTS, min_count=1).find([9]) == (2, 5)
    assert TokenMap.of([]).find([1]) == ()


def test_a_saved_map_is_the_same(tmp_path: Path) -> None:
    made = TokenMap.of(TEXTS)
    made.save(tmp_path / "map.json")
    assert TokenMap.load(tmp_path / "map.json") == made
    (tmp_path / "none.json").write_text("{}")
    for name in ("none.json", "nowhere.json"):
        with pytest.raises(ValueError, match=f"{name} is not a token map"):
            TokenMap.load(tmp_path / name)


@pytest.mark.parametrize("family", exhaustive(["whisper", "llama"], {"whisper"}))
def test_whatever_the_map_says_the_tokens_are_the_targets(family: str, tmp_path: Path) -> None:
    model, request = toys.model(family), toys.inputs(family, batch=3)
    expected = model.generate(**request, max_new_tokens=ROOM, do_sample=False)
    rows = [row[-ROOM:].tolist() for row in expected]
    wrong = TokenMap.of([row[::-1] for row in rows], min_count=1)
    right = TokenMap.of(rows, longest=6, min_count=1)
    right.save(tmp_path / "map.json")
    for known in (None, wrong, right, str(tmp_path / "map.json")):
        fast = mmspec.accelerate(model, "token-map", map=known)
        out = fast.generate(**request, max_new_tokens=ROOM, do_sample=False)
        assert torch.equal(out.sequences, expected)
        drawn: dict[str, Any] = {"max_new_tokens": ROOM, "temperature": 1.0, "seed": 1}
        plain = mmspec.decode_plain(model, **request, **drawn)
        assert torch.equal(fast.generate(**request, **drawn).sequences, plain.sequences)


def test_calls_of_an_empty_map_and_of_one_that_knows_the_answer() -> None:
    model, request = toys.model("whisper"), toys.inputs("whisper")
    said = mmspec.decode_plain(model, **request, max_new_tokens=ROOM)
    whole = said.sequences[0].tolist()

    def calls(known: TokenMap | None) -> int:
        fast = mmspec.accelerate(model, "token-map", map=known, length=5)
        stats = fast.generate(**request, max_new_tokens=ROOM).stats
        return int(stats.target_calls)

    assert calls(None) == calls(TokenMap(1, {})) == said.stats.target_calls == ROOM - 1
    known = TokenMap.of([whole], longest=ROOM, max_tokens=5, min_count=1)
    assert calls(known) == -(-(ROOM - 1) // 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [(3, "map is an int"), ("nowhere.json", "is not a token map")],
)
def test_what_is_no_map_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmspec.accelerate(toys.model("llama"), "token-map", map=given)


def test_a_map_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"longest=0.*leave nothing"):
        TokenMap.of(TEXTS, longest=0)
