"""The head of the clip model: exact output, and training on recorded features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes, zoo
from mmspec.modalities.common.families import make_reader
from mmspec.targets.readers.hooks import LayerStatesHook
from mmspec.training.feature_cache import FeatureCache
from mmspec.training.fitting import TrainingRun
from mmspec.training.heads import TrainingExample, read_example
from mmspec.zoo.clip_questions import clip_examples
from mmspec.zoo.motion import sample_moving_scenes
from tools.zoo.vlm import clip_heads, clips
from tools.zoo.vlm.architecture import LanguageShape, clip_qwen
from tools.zoo.vlm.clip_heads import PLAN, iterate_batches, iterate_requests
from tools.zoo.vlm.heads import acceptance
from tools.zoo.vlm.processors import clip_processor

NAME = "video-feature-head"
FLOOR = 4.0  # tokens a round of eight drafted ones, on held-out clips; the card says a little more
SMALL = LanguageShape(2, 96, 96, 3, vision_layers=1, vision_width=64)


@pytest.fixture(scope="module")
def processor() -> Any:
    return clip_processor()


@pytest.fixture
def read(processor: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """A small model, its answers to two questions, and what it read giving them."""
    torch.manual_seed(0)
    reader = make_reader(clip_qwen(SMALL, processor.tokenizer).eval())
    shown = sample_moving_scenes(2)
    monkeypatch.setattr(clips, "MAX_NEW_TOKENS", 6)
    with LayerStatesHook(reader, (0, len(reader.layers))) as noted:
        made = clips.generate_for_questions(reader.model, processor, shown, [(0, 3), (1, 5)])
    return reader, made, noted


def test_states_of_answers_are_those_of_a_second_reading(read: Any) -> None:
    """A row ends early: what stands behind its end teaches nothing."""
    reader, made, noted = read
    own = clip_heads.make_training_example(noted, made, int(made.new[1, 3]))
    assert own.real[1].sum() <= 3
    tokens = made.new[:, :-1].masked_fill(~own.real, -1)
    wanted = read_example(reader, TrainingExample(made.inputs, tokens), "hidden")
    assert torch.equal(own.real, wanted.real)
    assert list(own.prompt.padding) == list(wanted.prompt.padding)
    near: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(own.next[own.real], wanted.next[own.real], **near)
    seen = torch.cat((made.inputs["attention_mask"].bool(), own.real), 1)
    for name in ("embeds", "features", "tokens"):
        found, asked = getattr(own.prompt, name), getattr(wanted.prompt, name)
        torch.testing.assert_close(found[seen], asked[seen], **near)


def test_lessons_are_rows_of_the_cache(read: Any, processor: Any, tmp_path: Path) -> None:
    """As a head is told of them, they are what the target reads of prompt and answer."""
    reader, _, _ = read
    shown, cache = sample_moving_scenes(1), FeatureCache(tmp_path, {}, None)
    said = clip_heads.collect_responses(reader, processor, shown, cache, TrainingRun())
    assert len(said) == clip_heads.QUESTIONS
    lesson = next(iterate_batches(said, cache, len(said), 0))
    told = read_example(reader, lesson, "hidden")
    ids = torch.cat((lesson.inputs["input_ids"], lesson.tokens.clamp_min(0)), 1)
    assert told.prompt.tokens is not None
    assert torch.equal(told.prompt.tokens, ids)
    words = ids != reader.model.config.video_token_id
    words &= torch.cat((lesson.inputs["input_ids"] != 0, told.real), 1)
    torch.testing.assert_close(told.prompt.embeds[words], reader.embed(ids)[words])


def test_it_is_small_and_trained_by_its_recipe() -> None:
    assert (zoo.path(NAME) / "model.safetensors").stat().st_size <= 600_000
    assert recipes.get(PLAN.recipe).training.begin is PLAN.training.begin  # type: ignore[union-attr]
    assert zoo.load(NAME).config.visual_slots == "hidden"
    assert zoo.drafter_for("zoo:video", recipes.get("sparrow")) == f"zoo:{NAME}"
    assert zoo.drafter_for("zoo:video", recipes.get("coupled")) == "zoo:video-drafter"


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 3])
def test_output_is_that_of_the_target_and_drafts_are_mostly_accepted(
    processor: Any, rows: int
) -> None:
    target = zoo.load("video")
    fast = mmspec.accelerate(target, "sparrow", drafter=zoo.load(NAME), length=8)
    accepted = rounds = 0
    asked = clip_examples(6, seed=3)
    for some in (asked[at : at + rows] for at in range(0, len(asked), rows)):
        shown = [one.frames for one in some]
        inputs = clips.make_requests(processor, shown, [one.prompt for one in some])
        how: dict[str, Any] = {"max_new_tokens": clips.MAX_NEW_TOKENS, "do_sample": False}
        out = fast.generate(**inputs, **how)
        assert torch.equal(out.sequences, target.generate(**inputs, **how))
        assert out.stats.fallback is None
        accepted += out.stats.num_accepted_draft_tokens
        rounds += out.stats.num_spec_steps
    assert 1 + accepted / rounds >= FLOOR


@pytest.mark.slow
def test_the_card_tells_the_truth(processor: Any) -> None:
    """Fewer prompts than the card's, so within half a token."""
    card = (zoo.path(NAME) / "README.md").read_text()
    said = float(card.partition("| deep acceptance length | ")[2].split()[0])
    given = (zoo.load("video"), PLAN.recipe, zoo.load(NAME), list(iterate_requests(processor, 32)))
    assert abs(acceptance(*given, PLAN.drafted, clips.MAX_NEW_TOKENS) - said) < 0.5


@pytest.mark.slow
def test_a_short_trial_writes_a_head_that_loads(tmp_path: Path) -> None:
    stages: list[str] = []
    zoo.train(NAME, tmp_path, steps=1, progress=lambda *told: stages.append(told[0]))
    assert {"listen", "head"} == set(stages)
    assert f"mmspec zoo train {NAME}" in (tmp_path / "README.md").read_text()
    mmspec.accelerate("zoo:video", "sparrow", drafter=tmp_path)
