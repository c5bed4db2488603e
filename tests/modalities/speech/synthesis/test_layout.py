"""Layouts of codec codes in a vocabulary: all ids are codes, special tokens, or suppressed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mmspec.modalities.speech import LAYOUT
from mmspec.modalities.speech.synthesis.layout import FlatFrames, SpeechCodes

CODES = SpeechCodes(first=10, count=8, begin=3, end=4, voices={"anna": 5, "ben": 6})


def model(layout: Any = None, vocabulary: int = 20) -> Any:
    table = nn.Embedding(vocabulary, 2)
    config = SimpleNamespace(**({} if layout is None else {LAYOUT: layout}))
    return SimpleNamespace(config=config, get_input_embeddings=lambda: table)


def test_a_layout_is_given_or_configured() -> None:
    fields = {"first": 10, "count": 8, "begin": 3, "end": 4}
    assert SpeechCodes.of(model(fields), None) == SpeechCodes(10, 8, 3, 4)
    assert SpeechCodes.of(model(fields), CODES) is CODES
    assert SpeechCodes.of(model(), {**fields, "voices": CODES.voices}) == CODES


def test_every_id_is_speech_or_suppressed() -> None:
    suppressed = CODES.suppressed_ids(20)
    speech = {*range(10, 18), CODES.end}
    assert speech | set(suppressed) == set(range(20))
    assert not speech & set(suppressed)


def test_voices_are_known_by_name_and_the_first_is_the_default() -> None:
    assert [CODES.voice_id(name) for name in (None, "anna", "ben")] == [5, 5, 6]
    assert SpeechCodes(10, 8, 3, 4).voice_id(None) is None
    with pytest.raises(ValueError, match="voice='carl' is not known; choose one of anna, ben"):
        CODES.voice_id("carl")
    with pytest.raises(ValueError, match="choose one of none; drop it"):
        SpeechCodes(10, 8, 3, 4).voice_id("anna")


def test_frames_are_codes_up_to_the_end() -> None:
    frames = FlatFrames(CODES, max_tokens=4)
    assert torch.equal(frames.codes([10, 17, 12]), torch.tensor([[0, 7, 2]]))
    assert torch.equal(frames.codes([10, 17, CODES.end]), torch.tensor([[0, 7]]))
    assert [frames.count_frames(row) for row in ([], [10], [10, 4])] == [0, 1, 1]
    assert [frames.is_over(row) for row in ([], [10] * 3, [10] * 4, [10, 4])] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"count": 0}, "count=0 must be a whole number"),
        ({"first": -1}, "first=-1 is not an id of 0 to 19"),
        ({"begin": 20}, "begin=20 is not an id"),
        ({"voices": {"anna": True}}, "anna=True is not an id"),
        ({"count": 11}, "11 codes from 10 do not fit into 20 ids"),
        ({"end": 17}, "end=17 is a code"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SpeechCodes.of(model(), {**vars(CODES), **change})


def test_codecs_that_do_not_fit_are_refused() -> None:
    CODES.check_codec(SimpleNamespace(books=1, size=8))  # type: ignore[arg-type]
    for books, size, says in ((2, 8, "2 codebooks"), (1, 9, "9 codes")):
        with pytest.raises(ValueError, match=says):
            CODES.check_codec(SimpleNamespace(books=books, size=size))  # type: ignore[arg-type]


def test_a_model_without_a_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="does not define which ids are codes"):
        SpeechCodes.of(model(), None)
    with pytest.raises(ValueError, match=r"codes=3 is no SpeechCodes"):
        SpeechCodes.of(model(), 3)
