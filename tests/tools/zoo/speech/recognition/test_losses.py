"""What the recognisers of the zoo learn from: ids, times, letters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from mmspec.modalities.speech.recordings import recordings
from mmspec.modalities.speech.utterances import RATE_HZ
from mmspec.training.fitting import CosineDecay, TrainingRun
from tools.zoo.initialization import expand_blocks
from tools.zoo.speech.recognition import granite, spans, whisper
from tools.zoo.speech.recognition import granite_training as granite_learning
from tools.zoo.speech.recognition import whisper_training as whisper_learning
from tools.zoo.speech.recognition.evaluate import word_errors
from tools.zoo.speech.recognition.losses import (
    LABELS,
    LetterPositions,
    ctc_loss,
    decode_letters,
    guided_attention_loss,
)
from tools.zoo.speech.recognition.spans import AlignedSpan
from tools.zoo.speech.recognition.windows import AudioWindow, Segment, join_windows


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


def window(number: int) -> AudioWindow:
    one = recordings()[number]
    waveform = one.waveform()
    return AudioWindow(waveform, (Segment(one.text, 0.1, len(waveform) / RATE_HZ - 0.1),))


def test_a_sentence_is_written_with_its_times(reader: Any) -> None:
    ids = whisper_learning.with_times(reader, window(1))
    found = reader.tokenizer.decode(ids, output_offsets=True)["offsets"]
    [text, times] = (found[0][key] for key in ("text", "timestamp"))
    assert text == " " + recordings()[1].text
    assert times == pytest.approx((0.1, len(window(1).waveform) / RATE_HZ - 0.1), abs=0.051)


def test_a_second_sentence_that_does_not_end_is_left_to_the_next_window(reader: Any) -> None:
    first, second = window(1), window(2)
    both = join_windows(first, second)
    assert len(both.segments) == 2
    cut = AudioWindow(both.waveform[: 3 * RATE_HZ], both.segments)
    said = reader.tokenizer.decode(
        whisper_learning.with_times(reader, cut), decode_with_timestamps=True
    )
    begin_s = len(first.waveform) / RATE_HZ + 0.1
    assert said.endswith(f"<|{round(begin_s, 1):.2f}|><|endoftext|>")
    assert first.segments[0].text in said
    assert second.segments[0].text not in said
    assert whisper_learning.without_times(reader, cut) is None
    silent = AudioWindow(torch.zeros(RATE_HZ), ())
    empty = reader.tokenizer.decode(whisper_learning.without_times(reader, silent))
    assert empty.endswith("<|notimestamps|><|endoftext|>")


def test_letters_are_collapsed_and_blanks_dropped() -> None:
    path = [97, 97, 0, 97, 98, 98, 0, 99]
    logits = functional.one_hot(torch.tensor([path]), LABELS).float() * 20
    assert decode_letters(logits, torch.tensor([7])) == ["aab"]
    assert decode_letters(logits, torch.tensor([8])) == ["aabc"]
    right, wrong = (ctc_loss(logits, [said], torch.tensor([7])) for said in ("aab", "abb"))
    assert float(right) < 1e-4
    assert float(wrong) > 1


def test_word_errors_are_counted_over_all() -> None:
    found = word_errors(["a red ring", "a star"], ["a ring", "a big star"])
    assert (found.wrong, found.total) == (2, 5)
    assert found.rate == 0.4


# --- learning to listen ---------------------------------------------------------------------------


def make_span(text: str, pause: int = 3) -> AlignedSpan:
    """Two frames a letter, a pause behind each; a state is the number of its frame."""
    step = 2 + pause
    states = torch.arange(len(text) * step).float()[:, None].expand(-1, granite.WIDTH)
    frames = tuple((at * step, at * step + 2) for at in range(len(text)))
    return AlignedSpan((states / 16).half(), text, frames)


def test_a_span_has_the_sound_of_its_words_alone() -> None:
    whole = make_span("a red ring")
    same = whole.slice_words(0, 3)
    assert (same.text, same.frames) == (whole.text, whole.frames)
    assert torch.equal(same.states, whole.states)
    middle = whole.slice_words(1, 1)
    assert middle.text == "red"
    begin = int(16 * middle.states[0, 0])
    said = [(begin + start, begin + stop) for start, stop in middle.frames]
    assert said == list(whole.frames[2:5])
    assert whole.frames[1][0] < begin <= whole.frames[2][0]
    end = begin + len(middle.states)
    assert whole.frames[4][1] <= end <= whole.frames[5][1]
    assert make_span("").slice_words(0, 1).text == ""


def test_lessons_grow_from_words_to_sentences_and_keep_to_their_places() -> None:
    pool = [make_span("is the red ring above the blue star", 0), make_span("a star", 0)]
    made, drawn = spans.batch_spans(pool, 200, 3, 40, 0), list[list[AlignedSpan]]()
    while sum(map(len, drawn)) < 512:
        drawn.append(next(made))
    counts = [len(one.text.split()) for batch in drawn for one in batch]
    assert counts.count(1) > len(counts) / 2
    for batch in drawn:
        assert sum(-(-len(one.states) // 3) + len(one.text) + 1 for one in batch) <= 200
    while len(drawn) < 200:
        drawn.append(next(made))
    assert {one.text for batch in drawn[-20:] for one in batch} == {one.text for one in pool}


def test_guided_attention_looks_where_a_letter_is_heard() -> None:
    places = LetterPositions(*torch.tensor([[0, 5, 1], [0, 6, 3]]).unbind(1))
    right = torch.full((1, 2, 8, 8), 1 / 8)
    right[0, 0, 5], right[0, 0, 6] = torch.eye(8)[1], torch.eye(8)[3]
    wrong = right.roll(1, dims=-1)
    found = [float(guided_attention_loss([one] * 3, places)) for one in (right, wrong)]
    assert found[0] == pytest.approx(0, abs=1e-3)
    assert found[1] > 5
    with pytest.raises(ValueError, match="eager"):
        guided_attention_loss([], places)


@pytest.mark.exhaustive
def test_a_text_model_that_listens_is_grown_and_says_the_same() -> None:
    reader = granite.build_processor()
    model = granite.build(reader.tokenizer, granite.SHALLOW).train()
    losses: list[float] = []
    course = TrainingRun(progress=lambda *told: losses.append(told[3]))
    pool = [make_span("a red ring", 1), make_span("a star", 1)]
    granite_learning.train_decoder(model, reader, pool, 8, CosineDecay(8, 2e-3), course)
    assert losses[-1] < losses[0]
    deep = granite.deepen(model, reader.tokenizer)
    inner, other = (one.model.language_model.eval() for one in (model, deep))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        states = [one(ids).last_hidden_state for one in (inner, other)]
    assert torch.equal(*states)
    assert len(other.layers) == granite.TEXT_LAYERS
    with pytest.raises(ValueError, match="multiple"):
        expand_blocks(inner.layers, other.layers[:3])
