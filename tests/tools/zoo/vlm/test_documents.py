"""The models of VideoSpeculateRAG: their words, where they start, and what they are trained on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from mmspec import zoo
from mmspec.modalities.vlm.video_rag import parse_fields
from mmspec.training.fitting import TrainingRun
from mmspec.zoo.motion import sample_moving_scenes
from tools.zoo.vlm import documents
from tools.zoo.vlm.architecture import CLIP_TARGET
from tools.zoo.vlm.clips import deepen, make_requests
from tools.zoo.vlm.documents import (
    SMALL,
    collect_verdicts,
    document_processor,
    start_small,
    write_pairs,
    write_verdict,
)

CLIPS = sample_moving_scenes(2, seed=3)


def test_every_word_is_known_and_those_of_the_base_keep_their_numbers() -> None:
    tokenizer, base = document_processor().tokenizer, zoo.processor(documents.BASE).tokenizer
    assert base.get_vocab().items() <= tokenizer.get_vocab().items()
    assert tokenizer.get_vocab() == zoo.processor(SMALL).tokenizer.get_vocab()
    pairs = [pair for one in CLIPS for pair in write_pairs(*one, only_right=False)]
    texts = [text for pair in pairs for text in pair]
    texts += [write_verdict(documents._question(*CLIPS[0], 0), answer)[0] for _, answer in pairs]
    assert all(tokenizer.unk_token_id not in ids for ids in tokenizer(texts).input_ids)
    assert tokenizer.unk_token_id in base(texts[0]).input_ids


def test_the_small_model_starts_with_layers_of_the_base_and_the_large_one_as_the_small() -> None:
    processor, base = document_processor(), zoo.load(documents.BASE)
    small = start_small(processor)
    mine, theirs = small.model.language_model, base.model.language_model
    assert mine.layers[1].mlp.up_proj.weight.equal(theirs.layers[4].mlp.up_proj.weight)
    known = theirs.embed_tokens.weight
    assert mine.embed_tokens.weight[: len(known)].equal(known)
    new = mine.embed_tokens.weight[len(known) :]
    torch.testing.assert_close(new.std(), known.std(), atol=1e-3, rtol=1e-3)
    tower = (one.model.visual.state_dict() for one in (small, base))
    assert all(a.equal(b) for a, b in zip(*(one.values() for one in tower), strict=True))
    large = deepen(small, processor, CLIP_TARGET).eval()
    clip = [Image.new("RGB", (48, 48), colour) for colour in ("white", "red") * 16]
    inputs = make_requests(processor, [clip], ["where does nora go?"])
    with torch.no_grad():
        torch.testing.assert_close(
            large(**inputs).logits, small.eval()(**inputs).logits, atol=2e-4, rtol=1e-4
        )


@pytest.mark.parametrize("only_right", [True, False])
def test_answers_have_fields_and_prompts_the_right_document_or_all(only_right: bool) -> None:
    for scene, number in CLIPS:
        pairs = write_pairs(scene, number, only_right)
        assert len({prompt for prompt, _ in pairs}) > 1
        for at, (prompt, answer) in enumerate(pairs):
            one, fields = documents._question(scene, number, at), parse_fields(answer)
            assert fields["subject"] == one.subjects[one.right]
            assert fields["reasoning"] == one.documents[one.right]
            assert fields["answer"] == one.example.answer
            count = sum(document in prompt for document in one.documents)
            assert count == (1 if only_right else len(one.documents))
            assert one.documents[one.right] in prompt
            assert write_verdict(one, answer)[1] == "yes"
            wrong = f"the {fields['subject']} goes up from bottom to bottom."
            assert write_verdict(one, f"answer: {wrong}")[1] == "no"
            assert write_verdict(one, f"{answer} {wrong}")[1] == "no"


def test_verdicts_are_on_drafts_of_every_document(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def respond(model: object, processor: object, clips: object, prompts: list[str]) -> Any:
        asked.extend(prompts)
        texts = [f"subject: it reasoning: so answer: {at}" for at, _ in enumerate(prompts)]
        return SimpleNamespace(texts=texts)

    monkeypatch.setattr(documents, "generate_responses", respond)
    (found,) = collect_verdicts(CLIPS[:1], TrainingRun())
    one = documents._question(*CLIPS[0], documents.QUESTIONS)
    assert len(asked) == len(one.documents)
    assert all(doc in prompt for doc, prompt in zip(one.documents, asked, strict=True))
    questions, verdicts = found[:4], found[4:]
    assert questions == write_pairs(*CLIPS[0], only_right=False)[:4]
    assert [answer for _, answer in verdicts] == ["no"] * len(one.documents)
    assert all(f"Answer: {at}\n" in prompt for at, (prompt, _) in enumerate(verdicts))
