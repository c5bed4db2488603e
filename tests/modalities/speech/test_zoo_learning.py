"""What the recognisers of the zoo learn from: ids, times, letters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from mmspec.modalities.speech.recognition.zoo import granite, whisper, whisper_learning
from mmspec.modalities.speech.recognition.zoo.ctc import LABELS, ctc_loss, letters
from mmspec.modalities.speech.recognition.zoo.evaluate import word_errors
from mmspec.modalities.speech.recognition.zoo.windows import HearingWindow, Segment, joined
from mmspec.modalities.speech.zoo.recordings import recordings
from mmspec.modalities.speech.zoo.speaking import RATE_HZ


@pytest.fixture(scope="module")
def reader() -> Any:
    return whisper.build_processor()


def test_control_tokens_stand_as_in_the_published_ones(reader: Any) -> None:
    tokenizer = reader.tokenizer
    ids = tokenizer.convert_tokens_to_ids
    prefix = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    assert tokenizer.prefix_tokens == [ids(one) for one in prefix]
    assert ids("<|en|>") == ids("<|startoftranscript|>") + 1
    assert ids("<|0.00|>") == ids("<|notimestamps|>") + 1 == tokenizer.all_special_ids[-1] + 1
    assert ids("<|4.00|>") == len(tokenizer) - 1
    assert len(tokenizer) - ids("<|0.00|>") == 4 * whisper.STEPS_PER_SECOND + 1


def test_any_text_has_ids(reader: Any) -> None:
    for tokenizer in (reader.tokenizer, granite.build_processor().tokenizer):
        ids = tokenizer("Größe 5 €", add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == "Größe 5 €"


def window(number: int) -> HearingWindow:
    one = recordings()[number]
    waveform = one.waveform()
    return HearingWindow(waveform, (Segment(one.text, 0.1, len(waveform) / RATE_HZ - 0.1),))


def test_a_sentence_is_written_with_its_times(reader: Any) -> None:
    ids = whisper_learning.stamped(reader, window(1))
    found = reader.tokenizer.decode(ids, output_offsets=True)["offsets"]
    [text, times] = (found[0][key] for key in ("text", "timestamp"))
    assert text == " " + recordings()[1].text
    assert times == pytest.approx((0.1, len(window(1).waveform) / RATE_HZ - 0.1), abs=0.051)


def test_a_second_sentence_that_does_not_end_is_left_to_the_next_window(reader: Any) -> None:
    first, second = window(1), window(2)
    both = joined(first, second)
    assert len(both.segments) == 2
    cut = HearingWindow(both.waveform[: 3 * RATE_HZ], both.segments)
    said = reader.tokenizer.decode(
        whisper_learning.stamped(reader, cut), decode_with_timestamps=True
    )
    begin_s = len(first.waveform) / RATE_HZ + 0.1
    assert said.endswith(f"<|{round(begin_s, 1):.2f}|><|endoftext|>")
    assert first.segments[0].text in said
    assert second.segments[0].text not in said
    assert whisper_learning.plain(reader, cut) is None
    silent = HearingWindow(torch.zeros(RATE_HZ), ())
    empty = reader.tokenizer.decode(whisper_learning.plain(reader, silent))
    assert empty.endswith("<|notimestamps|><|endoftext|>")


def test_letters_are_collapsed_and_blanks_dropped() -> None:
    path = [97, 97, 0, 97, 98, 98, 0, 99]
    logits = functional.one_hot(torch.tensor([path]), LABELS).float() * 20
    assert letters(logits, torch.tensor([7])) == ["aab"]
    assert letters(logits, torch.tensor([8])) == ["aabc"]
    right, wrong = (ctc_loss(logits, [said], torch.tensor([7])) for said in ("aab", "abb"))
    assert float(right) < 1e-4
    assert float(wrong) > 1


def test_word_errors_are_counted_over_all() -> None:
    found = word_errors(["a red ring", "a star"], ["a ring", "a big star"])
    assert (found.wrong, found.said) == (2, 5)
    assert found.rate == 0.4
