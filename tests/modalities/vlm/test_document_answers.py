"""VideoSpeculateRAG on the Scene world: its alignment, its ways to answer, and its row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torchvision.transforms.functional import to_pil_image

from mmspec import zoo
from mmspec.bench.compare import PLAIN
from mmspec.modalities.vlm import document_answers
from mmspec.modalities.vlm.document_answers import (
    NAME,
    DirectAnswer,
    DocumentModels,
    SpeculativeAnswer,
    answer_all,
    make_models,
    read_clip,
)
from mmspec.modalities.vlm.video_rag import key_frames, speculate_from_documents
from mmspec.registry import ZOO
from mmspec.zoo.clip_documents import document_questions
from mmspec.zoo.clip_questions import score_clip

LARGE, SMALL = "zoo:video-rag", "zoo:video-rag-drafter"


@pytest.fixture(scope="module")
def models() -> DocumentModels:
    return make_models(SMALL, SMALL)  # the large one takes longer


def test_names_are_aligned_with_frames_that_show_them(models: DocumentModels) -> None:
    first = 0
    for one in document_questions(20):
        clip = read_clip(one)
        pictures = [to_pil_image(clip.frames[at]) for at in key_frames(clip.frames)]
        found = models.align(one.subjects, pictures)
        assert found.shape == (len(one.subjects), len(pictures))
        assert bool((found.abs() <= 1 + 1e-9).all())
        first += int(found.amax(1).argmax()) == one.right
    assert first >= 15  # a quarter of them by chance


def test_all_frames_of_a_clip_are_read() -> None:
    (one,) = document_questions(1)
    clip = read_clip(one)
    assert (len(clip.frames), clip.indices) == (32, tuple(range(32)))


def test_ways_to_answer_share_their_drafts(models: DocumentModels) -> None:
    asked = document_questions(2, seed=1)
    found = answer_all(models, asked, seed=0)
    names = (PLAIN, NAME, "delta=0", "delta=1", "one at random")
    assert [*found] == [*names, "small model, all documents"]
    for at, one in enumerate(asked):
        verdict = speculate_from_documents(
            models.small,
            models.large,
            one.example.prompt,
            read_clip(one),
            one.documents,
            models.align,
        )
        answers = [draft.answer for draft in verdict.drafts]
        assert found[NAME][at].output == verdict.answer
        assert SpeculativeAnswer(models).run({"asked": one}, 0).output == verdict.answer
        best = max(verdict.drafts, key=lambda draft: (draft.reliability, draft.alignment))
        assert found["delta=0"][at].output == best.answer
        nearest = max(verdict.drafts, key=lambda draft: (draft.alignment, draft.reliability))
        assert found["delta=1"][at].output == nearest.answer
        assert found["one at random"][at].output in answers
        assert found[PLAIN][at].output == DirectAnswer(models.large).run({"asked": one}, 0).output
        assert not any(result.exact for results in found.values() for result in results)


def test_the_small_model_answers_from_the_document_that_it_is_given(models: DocumentModels) -> None:
    def count(document: int) -> int:
        """Questions of eight that are answered rightly from a document, 0 = the right one."""
        right = 0
        for one in document_questions(8, seed=2):
            own = replace(one, documents=(one.documents[one.right - document],))
            found = DirectAnswer(models.small).run({"asked": own}, 0).output
            right += score_clip(one.example, found)[0]
        return right

    right, wrong = count(0), count(1)
    assert right >= wrong + 2  # 0.88 and 0.27 of 120


def test_the_rules_are_the_ends_of_delta_and_the_published_one() -> None:
    """The best aligned draft is the least reliable one, then just outside the published band."""
    rules = document_answers._RULES
    reliability, alignment = torch.tensor([1.0, 0.69, 0.0]), torch.tensor([0.1, 0.2, 0.9])
    picked = {
        name: rules[name](reliability, alignment, 0) for name in rules if "random" not in name
    }
    assert picked == {NAME: 0, "delta=0": 0, "delta=1": 2}
    inside = torch.tensor([1.0, 0.71, 0.0])
    assert rules[NAME](inside, alignment, 0) == 1


def test_the_row_is_measured() -> None:
    found = document_answers.measure(LARGE, (SMALL,), 1, questions=2)
    assert [row.recipe for row in found.rows] == [PLAIN, NAME]
    assert [row.recipe for row in found.baselines] == [
        "delta=0",
        "delta=1",
        "one at random",
        "small model, all documents",
    ]
    rows = [*found.rows, *found.baselines]
    assert all(row.qualities["facts right"]["value"] is not None for row in rows)
    assert [row.speedup_over_plain is not None for row in rows] == [True] * 2 + [False] * 4
    assert found.rows[0].speedup_over_plain == 1
    assert (found.judged, found.requests, found.model) == (2, 1, LARGE)
    assert not any(row.exact for row in found.rows[1:])


def test_a_name_of_several_words_is_their_sum(models: DocumentModels) -> None:
    (one,) = document_questions(1)
    picture = one.example.frames[0]
    table = models.small.model.get_input_embeddings().weight
    tokenizer = models.small.processor.tokenizer
    ids = tokenizer("red star").input_ids
    with torch.no_grad():
        shown = models.small.processor.image_processor(images=[picture], return_tensors="pt")
        (slots,) = models.small.model.get_image_features(**shown, return_dict=True).pooler_output
        wanted = torch.nn.functional.cosine_similarity(table[ids].sum(0)[None], slots).max()
    found = models.align(["red star"], [picture])
    torch.testing.assert_close(found[0, 0].float(), wanted, atol=1e-5, rtol=1e-5)


def test_a_folder_is_measured_in_float32() -> None:
    """Its weights are float16, and would be run so."""
    found = document_answers.make_formatter(str(zoo.path(SMALL.removeprefix(ZOO))))
    assert found.model.dtype == torch.float32
