"""One draft and one verdict per document: every formula, and the whole procedure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel

from mmspec.api import accelerate
from mmspec.modalities.vlm import LanguageSettings, clips, video_rag
from mmspec.modalities.vlm.formatting import LanguageFormatter, format_chat
from mmspec.modalities.vlm.plug import load
from mmspec.modalities.vlm.video_rag import (
    ClipAlignment,
    DocumentDraft,
    key_frames,
    nearest_documents,
    parse_fields,
    select,
    speculate_from_documents,
)
from mmspec.zoo.scene import sample


def test_fields_are_read_in_any_layout() -> None:
    wanted = {"subject": "the red fox", "reasoning": "it has: a tail", "answer": "a fox"}
    layouts = (
        "Subject: the red fox\nReasoning: it has: a tail\nAnswer: a fox",
        "**Subject:** the red fox **Reasoning:** it has: a tail\n\n**Answer:** a fox",
        "answer: a fox\nSUBJECT : the red fox\nreasoning:it has: a tail",
    )
    for text in layouts:
        assert parse_fields(text) == wanted, text
    assert parse_fields("Subject: a fox")["subject"] == "a fox"  # nothing need follow it
    assert parse_fields("just words") == {"subject": "", "reasoning": "", "answer": "just words"}


def test_the_limits_of_the_band() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        r, e = torch.rand(2, 6, generator=generator, dtype=torch.float64)
        assert select(r, e, 0.0) == int(r.argmax())
        assert select(r, e, 1.0) == int(e.argmax())
        order = torch.randperm(6, generator=generator)
        assert int(order[select(r[order], e[order], 0.3)]) == select(r, e, 0.3)
        selected = select(r, e, 0.3)
        assert r[selected] >= r.max() - 0.3
    assert select(torch.tensor([0.5]), torch.tensor([0.0]), 0.3) == 0


def test_ties_go_to_the_more_reliable_one() -> None:
    r, e = torch.tensor([0.6, 0.8, 0.7, 0.8]), torch.zeros(4)  # no subject anywhere
    assert select(r, e, 0.3) == 1
    assert select(r, torch.tensor([0.4, 0.2, 0.4, 0.4]), 0.15) == 3


def test_an_answer_without_yes_or_no_is_not_reliable(
    clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = torch.tensor([0.0, 0.2]).double(), torch.tensor([0.0, 0.6]).double()
    monkeypatch.setattr(video_rag, "accelerate", lambda *_: None)
    monkeypatch.setattr(video_rag, "_generate_drafts", lambda *_: ["one", "two"])
    monkeypatch.setattr(video_rag, "_decisions", lambda *_: distribution)
    nobody = SimpleNamespace(model=None)
    found = speculate_from_documents(nobody, nobody, "what is there?", clip, ["a", "b"])
    assert [one.reliability for one in found.drafts] == pytest.approx([0.0, 0.25])
    assert (found.selected, found.answer) == (1, "two")


def test_key_frames_are_unlike_the_one_before() -> None:
    dark, light = (torch.full((3, 8, 8), value, dtype=torch.uint8) for value in (10, 200))
    assert key_frames(torch.stack([dark, dark, light, light, dark])) == [0, 2, 4]
    assert key_frames(torch.stack([dark])) == [0]
    assert key_frames(torch.stack([dark, light]), threshold=-1.0) == [0]


def test_documents_nearest_to_any_frame() -> None:
    index = torch.eye(4)
    queries = torch.tensor([[0.0, 2.0, 0.1, 0.0], [0.0, 0.1, 0.0, 1.0]])
    assert nearest_documents(queries, index, 3) == [1, 3, 2]  # none twice, whatever its length
    assert nearest_documents(queries, index, 9) == [1, 3, 2, 0]
    with pytest.raises(ValueError, match="count=0"):
        nearest_documents(queries, index, 0)


@pytest.fixture(scope="module")
def formatter() -> LanguageFormatter:
    name = "zoo:qwen2.5-vl"
    return LanguageFormatter(name, load(name), LanguageSettings(max_new_tokens=12))


@pytest.fixture(scope="module")
def clip() -> clips.VideoClip:
    return clips.read([sample(seed).render(48) for seed in (3, 3, 4, 4)])


@pytest.mark.exhaustive
def test_every_document_has_its_answer_and_its_verdict(formatter: Any, clip: Any) -> None:
    documents = ["a red circle at the top", "two stars", "a red circle at the top"]
    found = speculate_from_documents(formatter, formatter, "what is there?", clip, documents)
    assert [one.document for one in found.drafts] == documents
    assert found.drafts[0] == found.drafts[2]
    assert found.answer == found.drafts[found.selected].answer
    best = max(one.reliability for one in found.drafts)
    assert found.drafts[found.selected].reliability == best  # nothing is aligned, so ties decide
    assert all(0 < one.decided <= 1 and 0 <= one.reliability <= 1 for one in found.drafts)
    fast = speculate_from_documents(
        formatter, formatter, "what is there?", clip, documents, recipe="prompt-lookup"
    )
    assert [one.text for one in fast.drafts] == [one.text for one in found.drafts]
    alone = speculate_from_documents(formatter, formatter, "what is there?", clip, documents[1:2])
    assert alone.selected == 0
    assert alone.drafts[0].text == found.drafts[1].text
    assert alone.drafts[0].reliability == pytest.approx(found.drafts[1].reliability, abs=1e-5)


def test_a_verdict_is_that_of_a_whole_forward(formatter: Any, clip: Any) -> None:
    draft = DocumentDraft("", "", "a star", "it is there", "yes")
    yes, no = video_rag._decisions(formatter, "what is there?", clip, [draft])
    prompt = video_rag.JUDGE.format(
        question="what is there?", subject="a star", reasoning="it is there", answer="yes"
    )
    inputs = formatter.request([prompt], videos=[clip])
    inputs = {name: value for name, value in inputs.items() if name not in formatter.sampling}
    with torch.no_grad():
        distribution = formatter.model(**inputs).logits[0, -1].double().softmax(-1)
    words = formatter.processor.tokenizer
    expected = [float(distribution[words.convert_tokens_to_ids(word)]) for word in ("yes", "no")]
    assert [float(yes), float(no)] == pytest.approx(expected, rel=1e-4)


def test_drafts_are_judged_as_branches_after_one_reading_of_the_clip(
    formatter: Any, clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prompts of a batch, which a model without trees reads; equal drafts are read once."""
    answers = ("yes", "it is in the center, and it is large", "yes", "no")
    drafts = [DocumentDraft("", "", "a star", "it is there", one) for one in answers]
    reader = accelerate(formatter.model, "plain").session.bound.backbone
    prefills, blocks = list[Any](), list[Any]()

    def note(calls: list[Any], method: Any, length: Any) -> Any:
        def call(*args: Any, **settings: Any) -> Any:
            calls.append(length(args))
            return method(*args, **settings)

        return call

    kind = type(reader)
    monkeypatch.setattr(video_rag, "check", lambda *_, **__: False)
    monkeypatch.setattr(
        kind, "prefill", note(prefills, kind.prefill, lambda args: args[1]["input_ids"].shape)
    )
    monkeypatch.setattr(kind, "read", note(blocks, kind.read, lambda args: args[2].length))
    found = torch.stack(video_rag._decisions(formatter, "what is there?", clip, drafts))
    (own,) = prefills
    assert own[0] == 1
    (block,) = blocks
    monkeypatch.setattr(kind, "reads_trees", False)
    batched = torch.stack(video_rag._decisions(formatter, "what is there?", clip, drafts))
    assert len(blocks) == 1
    _, (rows, length) = prefills
    assert rows == 4
    assert block < 3 * (length - own[1])  # three answers, as one comes twice, two of them shorter
    torch.testing.assert_close(found, batched, rtol=1e-4, atol=1e-7)
    assert found[:, 0].equal(found[:, 2])
    monkeypatch.setattr(kind, "reads_trees", True)
    video_rag._decisions(formatter, "what is there?", clip, [*drafts, *drafts])
    assert blocks == [block, block]
    assert not found[:, 0].allclose(found[:, 3])


@torch.no_grad()
def test_branches_begin_after_the_clip(formatter: Any, clip: Any) -> None:
    """Prompts whose tokens before its end are others are read in a batch."""
    reader = accelerate(formatter.model, "plain").session.bound.backbone
    prompts = ["what is there?", "what is there now?"]
    assert video_rag._read_branches(reader, formatter, prompts, clip) is not None
    chat = formatter.processor.chat_template
    last = (
        "{% for message in messages %}{{ message['content'][1]['text'] }}{% endfor %}<|video_pad|>"
    )
    formatter.processor.chat_template = last
    try:
        assert video_rag._read_branches(reader, formatter, prompts, clip) is None
    finally:
        formatter.processor.chat_template = chat


def test_a_suffix_is_what_follows_the_same_tokens() -> None:
    assert video_rag._suffixes([[1, 2, 3], [1, 2, 4, 5]]) == [(3,), (4, 5)]
    assert video_rag._suffixes([[1, 2, 3], [1, 2]]) == [(2, 3), (2,)]  # none is empty
    assert video_rag._suffixes([[1, 2], [1, 2]]) == [(2,), (2,)]


@torch.no_grad()
def test_branches_are_tokens_of_the_prompts_and_of_no_image(
    formatter: Any, clip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that makes other tokens, and drafts that name the placeholder of a clip."""
    reader = accelerate(formatter.model, "plain").session.bound.backbone
    prompts = ["what is there?", "what is <|video_pad|> there?"]
    assert video_rag._read_branches(reader, formatter, prompts, clip) is None
    chat = format_chat
    monkeypatch.setattr(video_rag, "format_chat", lambda *args: f"{chat(*args)} there")
    assert video_rag._read_branches(reader, formatter, ["a star", "two stars"], clip) is None


@torch.no_grad()
@pytest.mark.parametrize("verdict", ["refused", "in its own steps"])
def test_branches_that_the_model_would_misread_are_read_in_a_batch(
    formatter: Any, clip: Any, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    reader = accelerate(formatter.model, "plain").session.bound.backbone
    prompts = ["a star", "two stars"]
    assert video_rag._read_branches(reader, formatter, prompts, clip) is not None

    def check(*_: Any, uses_trees: bool) -> bool:
        assert uses_trees
        if verdict == "refused":
            raise ValueError("reads a tree wrongly")
        return True

    monkeypatch.setattr(video_rag, "check", check)
    assert video_rag._read_branches(reader, formatter, prompts, clip) is None


def test_subjects_are_aligned_with_key_frames(formatter: Any, clip: Any) -> None:
    seen: list[int] = []

    def align(names: Any, pictures: Any) -> torch.Tensor:
        seen.append(len(pictures))
        return torch.tensor([[0.1, 0.9] if "star" in name else [0.2, 0.3] for name in names])

    drafts = [DocumentDraft("", "", subject, "", "") for subject in ("a ring", "", "a star")]
    frames = key_frames(clip.frames)
    found = video_rag._alignments(drafts, clip, frames, align)
    assert found.tolist() == pytest.approx([0.3, 0.0, 0.9])
    assert seen == [len(frames)]
    assert video_rag._alignments(drafts, clip, frames, None).tolist() == [0, 0, 0]


def test_clip_gives_cosines() -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**small, **heads, "vocab_size": 20, "max_position_embeddings": 8},
        vision_config={**small, **heads, "image_size": 8, "patch_size": 4},
        projection_dim=12,
    )
    torch.manual_seed(0)
    model = CLIPModel(config).eval()
    ids, pixels = torch.randint(3, 19, (2, 5)), torch.randn(3, 3, 8, 8)

    class Inputs(dict[str, Any]):
        def to(self, device: Any) -> Inputs:
            return self

    def processor(**asked: Any) -> Inputs:
        assert len(asked["text"]) == 2
        assert len(asked["images"]) == 3
        return Inputs(input_ids=ids, pixel_values=pixels)

    picture = Image.new("RGB", (8, 8))
    found = ClipAlignment(model, processor)(["a", "b"], [picture] * 3)
    with torch.no_grad():
        texts = model.get_text_features(input_ids=ids, return_dict=True).pooler_output
        images = model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
    wanted = functional.cosine_similarity(texts[:, None], images[None], dim=-1)
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"documents": []}, "give one or more texts"),
        ({"documents": "a fox"}, "documents='a fox', but each of a list"),
        ({"documents": ["a"], "delta": 1.5}, "delta=1.5"),
    ],
)
def test_invalid_requests_are_refused(
    formatter: Any, clip: Any, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        speculate_from_documents(formatter, formatter, "what is there?", clip, **given)


@pytest.mark.parametrize("name", ["zoo:llava-drafter", "zoo:llava-text-drafter"])
def test_models_that_read_no_clip_are_refused(formatter: Any, clip: Any, name: str) -> None:
    other = LanguageFormatter(name, load(name), LanguageSettings(max_new_tokens=4))
    for drafter, verifier in ((other, formatter), (formatter, other)):
        with pytest.raises(ValueError, match=f"{name} reads no video"):
            speculate_from_documents(drafter, verifier, "what is there?", clip, ["a star"])


def test_a_text_model_gets_no_image() -> None:
    name = "zoo:llava-text-drafter"
    blind = LanguageFormatter(name, load(name), LanguageSettings())
    with pytest.raises(ValueError, match="is a text model and takes no image"):
        blind.request(["what is there?"], images=[Image.new("RGB", (48, 48))])
