"""Bundled heads: exact output, the acceptance lengths of their cards,
and are made by the trainings of recipes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import mmspec
from mmspec import recipes, zoo
from mmspec.zoo.language import scenes, write
from mmspec.zoo.scene_tensors import render_pixels
from tests.covering import covering, exhaustive
from tools.zoo.vlm.batches import Encoder, Sample
from tools.zoo.vlm.families import FAMILIES
from tools.zoo.vlm.heads import PLANS, acceptance, iterate_examples, iterate_requests, make_inputs

LONGEST = 96
FLOORS = {  # tokens a round of five drafted ones, on held-out scenes; cards say a little more
    "llava-eagle3": 5.0,
    "llava-feature-head": 4.0,
    "llava-medusa": 2.5,
    "qwen2.5-vl-eagle3": 4.5,
}
each = pytest.mark.parametrize("name", PLANS)


loaded = cache(zoo.load)  # nothing is written onto a target


def target(name: str) -> Any:
    return loaded(zoo.info(name).target)


@cache
def _encoder(family: str) -> Encoder:
    return Encoder(FAMILIES[family], FAMILIES[family].build_processor())


def encoder(name: str) -> Encoder:
    return _encoder(str(zoo.info(name).target))


def make_request(name: str, rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A ragged batch of held-out captions, and what the target says by itself."""
    first = next(one for one in PLANS if zoo.info(one).target == zoo.info(name).target)
    return _make_request(first, rows)  # heads of one target are asked the same


@cache
def _make_request(name: str, rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    shown = []
    for scene, number in scenes(rows, "held-out", seed=1):
        prompt, answer, _ = write(scene, number, "caption")
        shown.append(Sample(render_pixels(scene), prompt, answer))
    inputs = make_inputs(shown, encoder(name))
    wanted = target(name).generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
    return inputs, wanted


def accelerated(name: str, recipe: str, **parts: Any) -> mmspec.Accelerated:
    return mmspec.accelerate(target(name), recipe, drafter=zoo.load(name), **parts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", exhaustive(PLANS, ("llava-eagle3", "qwen2.5-vl-eagle3")))
def test_output_is_that_of_the_target_and_drafts_are_mostly_accepted(name: str) -> None:
    """Ragged, by chains of five; what was accepted is counted over the same run."""
    inputs, wanted = make_request(name, 2)
    out = accelerated(name, PLANS[name].recipe, length=5).generate(
        **inputs, max_new_tokens=LONGEST, do_sample=False
    )
    assert torch.equal(out.sequences, wanted)
    assert out.stats.fallback is None
    assert out.stats.mean_acceptance_length >= FLOORS[name]


@pytest.mark.parametrize(
    ("name", "rows", "parts"),
    covering(
        tuple(PLANS),
        (1, 3),
        ({}, {"tree": "auto"}, {"tree": [3, 2, 1]}, {"length": 4}),
        by_default=False,
    ),
    ids=str,
)
def test_shipped_heads_are_exact_by_chains_and_trees(
    name: str, rows: int, parts: dict[str, Any]
) -> None:
    """Greedily what the target says; sampled what plain decoding draws from the same seed."""
    inputs, wanted = make_request(name, rows)
    fast = accelerated(name, PLANS[name].recipe, **parts)
    for _ in range(1 + ("auto" in parts.values())):  # what was learned of sizes outlives a request
        out = fast.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
        assert torch.equal(out.sequences, wanted)
    how: dict[str, Any] = {"max_new_tokens": 48, "temperature": 1.0, "seed": 5}
    drawn = mmspec.decode_plain(target(name), **inputs, **how).sequences
    assert torch.equal(fast.generate(**inputs, **how).sequences, drawn)


@pytest.mark.slow
@each
def test_cards_tell_the_truth(name: str) -> None:
    """Fewer prompts than the card's, so within a third of a token."""
    card = (zoo.path(name) / "README.md").read_text()
    said = float(card.partition("| acceptance length | ")[2].split()[0])
    prompts = list(iterate_requests(encoder(name), 64))
    found = acceptance(target(name), PLANS[name].recipe, zoo.load(name), prompts, 5)
    assert abs(found - said) < 0.33


@pytest.mark.exhaustive
def test_a_short_trial_writes_a_head_that_loads(tmp_path: Path) -> None:
    stages: list[str] = []
    report = zoo.train(
        "llava-medusa", tmp_path, steps=1, progress=lambda *told: stages.append(told[0])
    )
    assert stages == ["listen", "head"]
    assert report["bytes"] == zoo.path("llava-medusa").joinpath("model.safetensors").stat().st_size
    assert "mmspec zoo train llava-medusa" in (tmp_path / "README.md").read_text()
    fast = mmspec.accelerate(target("llava-medusa"), "medusa", drafter=tmp_path)
    inputs, wanted = make_request("llava-medusa", 1)
    out = fast.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
    assert torch.equal(out.sequences, wanted)


def test_every_head_has_a_plan() -> None:
    made = {name for name in zoo.names() if zoo.info(name).trainer.endswith("zoo.vlm.heads")}
    assert made == set(PLANS) == set(FLOORS)


def test_a_model_of_the_zoo_brings_its_head() -> None:
    fast = mmspec.accelerate("zoo:llava", "eagle-3", length=5)
    inputs, wanted = make_request("llava-eagle3", 2)
    assert torch.equal(
        fast.generate(**inputs, max_new_tokens=LONGEST, do_sample=False).sequences, wanted
    )
    assert fast.sees == "target-states"
    assert mmspec.accelerate("zoo:llava", "coupled").sees == "pixels"
    with pytest.raises(ValueError, match="'kangaroo' needs a Kangaroo adapter; give drafter="):
        mmspec.accelerate("zoo:llava", "kangaroo")
    with pytest.raises(ValueError, match="made for another target"):
        mmspec.accelerate("zoo:qwen2.5-vl", "eagle-3", drafter="zoo:llava-eagle3")


@each
def test_heads_are_small_and_trained_by_their_recipe(name: str) -> None:
    plan = PLANS[name]
    assert (zoo.path(name) / "model.safetensors").stat().st_size <= 600_000
    assert recipes.get(plan.recipe).training.begin is plan.training.begin  # type: ignore[union-attr]


def test_lessons_are_answers_behind_their_prompts() -> None:
    """Tokens behind the end are marked, and rows are what the target would be asked."""
    made = encoder("llava-eagle3")
    said = [
        Sample(render_pixels(scene), *write(scene, number, "question")[:2])
        for scene, number in scenes(4, "train")
    ]
    lesson = next(iterate_examples(said, made, 4, 0))
    rows = [[one for one in row if one >= 0] for row in lesson.tokens.tolist()]
    assert all(row[-1] == made.tokenizer.eos_token_id for row in rows)
    words = made.tokenizer.batch_decode(rows, skip_special_tokens=True)
    assert sorted(words) == sorted(one.answer for one in said)
    assert lesson.inputs["input_ids"].shape == lesson.inputs["attention_mask"].shape


def test_a_head_is_offered_to_recipes_that_take_it() -> None:
    """HiViS, MSD and others want of a feature head what those of the zoo have not learned."""
    exact = [one for one in recipes.names("tokens") if recipes.get(one).exact]
    for recipe in set(exact) - {"massv"}:  # which takes small models of the target's width
        offered = zoo.drafter_for("zoo:llava", recipes.get(recipe))
        if offered is not None:
            mmspec.accelerate(loaded("llava"), recipe, drafter=offered)
    offers = {one: zoo.drafter_for("zoo:llava", recipes.get(one)) for one in ("hass", "hivis")}
    assert offers == {"hass": "zoo:llava-feature-head", "hivis": None}
