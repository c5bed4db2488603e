"""Speculative Verdict on the Scene world: its prompts, its choices, and the row of a tiny run."""

from __future__ import annotations

import pytest
import torch

from mmspec import zoo
from mmspec.modalities.vlm import LanguageSettings, verdicts
from mmspec.modalities.vlm.consensus import speculative_verdict
from mmspec.modalities.vlm.formatting import LanguageFormatter
from mmspec.modalities.vlm.plug import load
from mmspec.modalities.vlm.verdicts import BASE, CHOICES, PROMPTS, SMALL, Panel, Verdict, vote
from mmspec.modality import RunResult
from mmspec.registry import ZOO
from mmspec.zoo.facts import read_fact
from mmspec.zoo.language import examples, score, words

QUICK = ("zoo:llava-drafter", "zoo:qwen2.5-vl-drafter", "zoo:llava-text-drafter")
JUDGE = "zoo:llava-chat-verdict"


def _words_of(name: str) -> set[str]:
    tokenizer = zoo.processor(name.removeprefix(ZOO)).tokenizer
    return {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens}


def test_the_judge_knows_every_word_of_its_prompts() -> None:
    """Those of the templates, of all questions, and all that a small model can answer."""
    known = _words_of(JUDGE)
    assert known == _words_of(BASE)
    prompts = [PROMPTS.write_judge(one.prompt, [one.answer] * 3) for one in examples(40, "train")]
    said = {word for text in prompts for word in words(text)}
    assert not {*said} - known
    for name in SMALL:
        assert not {word for word in _words_of(name) if not word.startswith("<")} - known
    tokenizer = zoo.processor(JUDGE.removeprefix(ZOO)).tokenizer
    assert all(tokenizer.unk_token_id not in ids for ids in tokenizer(prompts).input_ids)
    assert tokenizer.unk_token_id in tokenizer("several assistants").input_ids


def test_the_judge_is_its_base_but_for_the_upper_layers() -> None:
    judge, base = (zoo.load(name.removeprefix(ZOO)).state_dict() for name in (JUDGE, BASE))
    changed = {name for name, weight in judge.items() if not weight.equal(base[name])}
    layers = {int(name.split(".layers.")[1].split(".")[0]) for name in changed}
    assert layers == {*range(12, 24)}
    assert not any("vision" in name for name in changed)


def test_answers_are_chosen_by_consensus_or_at_random() -> None:
    scores = torch.tensor([0.5, 0.1, 0.3])
    plain, all_of_them, two, drawn = CHOICES
    assert plain.select(scores, 3, 0) == ()
    assert all_of_them.select(scores, 3, 0) == (1, 2, 0)
    assert two.select(scores, 3, 0) == (1, 2)
    found = [drawn.select(None, 3, seed) for seed in range(60)]
    assert {frozenset(one) for one in found} == {frozenset(s) for s in ((0, 1), (0, 2), (1, 2))}
    assert found == [drawn.select(scores, 3, seed) for seed in range(60)]


def test_a_vote_is_on_what_is_stated_and_not_on_the_words() -> None:
    one = next(one for one in examples(12, "held-out", kind="question") if "is the" in one.prompt)
    assert [kind for kind, _ in one.facts or ()] == ["answer", "relation"]
    texts = ["it is above it: yes.", "so it is above the cross, yes", "it is below it: no."]
    assert {vote(one, texts, seed) for seed in range(20)} <= {*texts[:2]}
    assert {vote(one, texts[1:], seed) for seed in range(20)} == {*texts[1:]}
    assert read_fact("digit", "the red digit two and the blue digit one") == "one two"


@pytest.fixture(scope="module")
def formatters() -> dict[str, LanguageFormatter]:
    settings = LanguageSettings(max_new_tokens=8)
    return {name: LanguageFormatter(name, load(name), settings) for name in QUICK}


def test_a_verdict_is_that_of_the_public_function(
    formatters: dict[str, LanguageFormatter],
) -> None:
    small = [formatters[name] for name in QUICK]
    (one,) = examples(1, "held-out", kind="question")
    for choice in CHOICES[1:3]:
        found = speculative_verdict(
            small, small[0], one.prompt, one.image, choice.count, prompts=PROMPTS
        )
        run = Verdict(Panel(small[0], small), choice).run({"example": one}, 0)
        assert (run.output, run.exact) == (found.text, False)


def test_the_row_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways have facts and a time; questions answered together are answered as alone."""
    judge, *_ = QUICK
    monkeypatch.setattr(verdicts, "BASE", judge)
    monkeypatch.setattr(verdicts, "_MAX_NEW_TOKENS", 6)
    found = verdicts.measure(judge, QUICK, 1, questions=2)
    names = [row.recipe for row in found.rows]
    assert names == ["plain", "SV", "SV, keep=2", "SV, 2 at random"]
    assert [row.recipe for row in found.baselines] == [
        *(f"{name}, alone" for name in QUICK),
        verdicts.MAJORITY,
    ]
    assert all(row.qualities["facts right"]["value"] is not None for row in found.baselines)
    asked = examples(2, "held-out", verdicts._SEED, kind="question")
    settings = LanguageSettings(max_new_tokens=6)
    made = [LanguageFormatter(name, load(name), settings) for name in QUICK]
    for row, choice in zip(found.rows, CHOICES, strict=True):
        runner = Verdict(Panel(made[0], made), choice)
        texts = [runner.run({"example": one}, seed).output for seed, one in enumerate(asked)]
        pairs = [score(one, text) for one, text in zip(asked, texts, strict=True)]
        right, required = (sum(column) for column in zip(*pairs, strict=True))
        assert row.qualities["facts right"]["value"] == pytest.approx(right / required)
        assert row.speedup_over_plain is not None
        assert row.exact is False
    assert found.rows[0].speedup_over_plain == 1
    assert (found.judged, found.requests) == (2, 1)


def test_a_folder_is_measured_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are float16, and would be run so."""
    seen = list[torch.dtype]()

    def answer_all(panel: Panel, *_: object) -> dict[str, list[RunResult]]:
        seen.extend(one.model.dtype for one in (panel.judge, *panel.small))
        return {}

    monkeypatch.setattr(verdicts, "_answer_all", answer_all)
    monkeypatch.setattr(verdicts, "measure_answers", lambda *_: None)
    folder = str(zoo.path(QUICK[0].removeprefix(ZOO)))
    verdicts.measure(folder, QUICK[1:], 1, questions=1)
    assert seen == [torch.float32] * 3
