"""The judge of Speculative Verdict: its training prompts and its cache of answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mmspec import zoo
from mmspec.training.fitting import TrainingRun
from tools.zoo.vlm import verdict
from tools.zoo.vlm.batches import IGNORED, Encoder, Sample
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.verdict import Case, iterate_verdicts

CASE = Case(
    Sample(
        np.zeros((48, 48, 3), np.uint8), "where is the star?", "you can see the small red star."
    ),
    ("at the top.", "at the bottom.", "in the center."),
)


def test_prompts_have_three_answers_or_two_or_none_and_the_right_one_is_learnt() -> None:
    processor = zoo.processor(verdict.BASE)
    tokenizer = processor.tokenizer
    batches = iterate_verdicts([CASE] * 32, Encoder(FAMILIES["llava"], processor), 0)
    counts: dict[int, int] = {}
    for _ in range(8):
        batch = next(batches)
        assert not bool((batch.ids == tokenizer.unk_token_id).any())
        for row, labels in zip(batch.ids, batch.labels, strict=True):
            text, learnt = tokenizer.decode(row), tokenizer.decode(labels[labels != IGNORED])
            count = text.count("somebody wrote")
            counts[count] = counts.get(count, 0) + 1
            assert learnt == "you can see the small red star. <eos>"
            assert ("check them and answer" in text) == (count > 0)
    assert {*counts} == {0, 2, 3}
    assert counts[0] < min(counts[2], counts[3])


def test_answers_are_generated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "TEACHERS", ("llava-drafter",))
    found = verdict.collect_cases(1, TrainingRun(), tmp_path)
    assert len([*tmp_path.iterdir()]) == 1
    assert all(all(one.answers) for one in found)
    monkeypatch.setattr(verdict, "generate_responses", None)
    again = verdict.collect_cases(1, TrainingRun(), tmp_path)
    assert [one.answers for one in again] == [one.answers for one in found]
    assert [one.sample.prompt for one in again] == [one.sample.prompt for one in found]
