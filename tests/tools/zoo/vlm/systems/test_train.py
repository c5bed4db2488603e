"""Draft models of all systems: budget, pool, examples, control, and a trial of each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmspec
from mmspec import recipes, zoo
from mmspec.modalities.common.families import make_reader
from mmspec.models.folder import read_json
from mmspec.training.fitting import TrainingRun
from mmspec.zoo.language import examples
from mmspec.zoo.training import _card
from tools.zoo.vlm.systems import pool, train
from tools.zoo.vlm.systems.budget import CpuBudget, LossCurve, fit_until
from tools.zoo.vlm.systems.examples import (
    CAPTIONS,
    PICTURES,
    TEXT,
    ExampleSource,
    cache_states,
)
from tools.zoo.vlm.systems.measure import (
    acceptance,
    held_out_pool,
    move_slots,
    swap_pictures,
)
from tools.zoo.vlm.systems.plans import PLANS, entry_of, plan_of
from tools.zoo.vlm.systems.pool import AnswerPool, SceneRequest, SceneTurn, load_pool
from tools.zoo.vlm.systems.train import names

TARGET, QWEN = "llava", "qwen2.5-vl"
HEADS_OF_QWEN = ("drafter", "eagle3", "fastvlm", "massv", "msd", "vispec")


# --- budget ---------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CPU clock that is set by hand."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr("time.process_time", lambda: made.now)
    return made


def test_a_budget_ends_by_time_and_does_not_count_the_target(clock: Any) -> None:
    """A step takes 4 s, a forward of the target in it 2 s more; the target calls itself."""
    weight = nn.Parameter(torch.tensor(4.0))

    class Target(nn.Module):
        def forward(self, deep: int) -> None:
            clock.now += 1.0
            if deep:
                self(deep - 1)

    target, rates = Target(), []
    planned, curve = CpuBudget(minutes=1), LossCurve()

    def loss_of(done: float) -> Tensor:
        target(1)
        clock.now += 4.0
        rates.append(done)
        return weight.square()

    with planned.without(target):
        steps = fit_until(0.5, planned, curve, loss_of, ((), [weight]), 1e-2, "head", TrainingRun())
        more = fit_until(
            1.0, planned, curve, loss_of, ((), [weight]), 1e-2, "head", TrainingRun(steps=3)
        )
    assert steps == 8  # of 30 s
    assert more == 3  # a short trial
    assert planned.used() == 4.0 * 11
    assert rates == pytest.approx([at * 4 / 30 for at in range(8)] + [0.0, 4 / 28, 8 / 28])
    points = [one for one in curve.points() if one is not None]
    assert points == sorted(points, reverse=True)
    target(0)
    assert planned.used() == 4.0 * 11 + 1.0  # its forwards count again


# --- pool and examples ----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[TARGET, QWEN])
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AnswerPool:
    """Two requests, one of them with a second turn."""
    folder = tmp_path_factory.mktemp("answers")
    scenes = examples(3, "train", 0, "question")
    turns = [SceneTurn(one.prompt, one.answer) for one in scenes]
    made = [
        SceneRequest(scenes[0].image, "conversation", (turns[0], turns[1])),
        SceneRequest(scenes[2].image, "question", (turns[2],)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "make_requests", lambda *given: made)
        return load_pool(request.param, 2, folder)


def target_of(answers: AnswerPool) -> str:
    """The target of a pool: one with grids is Qwen's."""
    return QWEN if answers.grids else TARGET


@pytest.mark.exhaustive
def test_later_turns_follow_the_targets_own_answers(answers: AnswerPool) -> None:
    first, second = (
        next(one for one in answers.answers if one.category == "conversation" and one.turn == turn)
        for turn in (0, 1)
    )
    assert first.picture == second.picture
    own = [*first.prompt.tolist(), *first.tokens.tolist()]
    assert second.prompt.tolist()[: len(own)] == own
    model, processor = zoo.load(target_of(answers)), zoo.processor(target_of(answers))
    out = model.generate(
        input_ids=second.prompt[None],
        **answers.media([second], second.prompt[None]),
        do_sample=False,
        max_new_tokens=len(second.tokens),
    )
    assert out[0, len(second.prompt) :].tolist() == second.tokens.tolist()
    assert second.reference.tolist()[-1] == processor.tokenizer.eos_token_id


@pytest.mark.exhaustive
def test_a_pool_is_continued_and_read_again(
    answers: AnswerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise AssertionError("generated again")

    monkeypatch.setattr(pool, "answer_requests", refuse)
    monkeypatch.setattr(pool, "make_requests", lambda *given: [None] * 2)
    monkeypatch.setattr(pool, "_order", list)
    again = load_pool(target_of(answers), 2, answers.folder.parents[1])
    assert [one.tokens.tolist() for one in again.answers] == [
        one.tokens.tolist() for one in answers.answers
    ]
    (file,) = answers.folder.iterdir()
    moved = file.rename(file.with_suffix(".away"))
    with pytest.raises(AssertionError, match="generated again"):
        load_pool(target_of(answers), 2, answers.folder.parents[1])
    moved.rename(file)


@pytest.mark.exhaustive
def test_examples_hold_pictures_text_or_reference_captions(answers: AnswerPool) -> None:
    reader = make_reader(zoo.load(target_of(answers)))
    source = ExampleSource(answers, reader, 0, batch=3)
    shown, text, captions = (source.next(kind) for kind in (PICTURES, TEXT, CAPTIONS))
    visual = torch.tensor(sorted(reader.visual_ids))
    assert int((shown.inputs["input_ids"] == answers.image_token).sum()) == 3 * 36
    assert len(shown.inputs["image_grid_thw" if answers.grids else "pixel_values"]) == 3
    assert not torch.isin(text.inputs["input_ids"], visual).any()
    assert set(text.inputs) == {"input_ids", "attention_mask"}
    assert sorted(text.tokens[text.tokens >= 0].tolist()) == sorted(
        shown.tokens[shown.tokens >= 0].tolist()
    )
    references = [one.reference.tolist() for one in answers.answers if one.turn == 0]
    rows = [[one for one in row if one >= 0] for row in captions.tokens.tolist()]
    assert sorted(rows) == sorted(references)


@pytest.mark.exhaustive
@pytest.mark.parametrize("head", ["msd", "vispec", "hivis", "specflash", "spec-llava", "medusa"])
def test_losses_are_the_same_from_the_cache(answers: AnswerPool, head: str) -> None:
    """Of all plans that say so, with pictures and as text."""
    torch.manual_seed(0)
    reader, plan = make_reader(zoo.load(target_of(answers))), PLANS[head]
    caches = cache_states(answers, reader)
    more = {"processor": zoo.processor(target_of(answers))} if plan.sees == "pixels" else {}
    counts = torch.zeros(reader.vocabulary, dtype=torch.int64)
    made = plan.begin(reader, counts, **plan.changes, **more)
    for stage in plan.stages:
        found = []
        for given in ({}, caches):
            torch.manual_seed(1)
            source = ExampleSource(answers, reader, 0, caches=given)
            found.append(float(stage.loss(reader, made, stage.draw(source, 0.4))))
        assert found[0] == pytest.approx(found[1], rel=1e-4)


# --- the control ----------------------------------------------------------------------------------


def test_pictures_are_moved_to_the_row_before() -> None:
    values = torch.arange(12.0).view(3, 4, 1)
    moved = move_slots(values, [[-3, -2], [-4, -3], [-2, -1]])[..., 0].tolist()
    assert moved == [[0, 4, 5, 3], [10, 11, 6, 7], [8, 9, 1, 2]]


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [TARGET, QWEN])
def test_a_sighted_drafter_loses_by_other_pictures_and_a_blind_one_does_not(
    target: str, tmp_path: Path
) -> None:
    held_out, model = held_out_pool(target, tmp_path, 6), zoo.load(target)
    visual = held_out.image_token
    lengths = []
    for recipe, drafter in (("coupled", "drafter"), ("spd-mllm", "text-drafter")):
        folder, plan = zoo.path(f"{target}-{drafter}"), recipes.get(recipe)
        own = acceptance(plan, model, folder, held_out)["all"]
        lengths.append(
            (own, acceptance(swap_pictures(plan, visual), model, folder, held_out)["all"])
        )
    assert lengths[0][1] < lengths[0][0] - 0.2
    assert lengths[1][1] == lengths[1][0]


# --- plans ----------------------------------------------------------------------------------------


def test_plans_share_the_budget_and_belong_to_their_recipes() -> None:
    for head, plan in PLANS.items():
        assert sum(stage.share for stage in plan.stages) == pytest.approx(1.0)
        assert plan.recipe in recipes.names("tokens")
        assert not set(plan.recipes) - set(recipes.names("tokens"))
        assert plan_of(entry_of(TARGET, head)) is plan
    assert [one.name for one in names(TARGET)] == [f"{TARGET}-{head}" for head in PLANS]
    with pytest.raises(ValueError, match=r"llava-nothing has no plan; choose one of .*massv, "):
        plan_of(zoo.Entry("llava-nothing", "", "", "", TARGET))


@pytest.mark.parametrize(
    ("target", "heads"),
    [("llava-chat", set(PLANS)), ("qwen2.5-vl-chat", {"vispec", "drafter", "eagle3"})],
)
def test_the_bundled_ones_are_those_of_the_plans_and_are_found_by_recipe(
    target: str, heads: set[str]
) -> None:
    bundled = [zoo.info(name) for name in zoo.names() if zoo.info(name).target == target]
    assert {one.name for one in bundled} == {f"{target}-{head}" for head in heads}
    for entry in bundled:
        plan = plan_of(entry)
        head = entry.name.removeprefix(f"{target}-")
        assert replace(entry, recipes=tuple(entry.recipes)) == entry_of(target, head)
        folder = zoo.path(entry.name)
        report = json.loads((folder / "measured.json").read_text())
        assert (folder / "README.md").read_text() == _card(entry, train, report)
        for recipe in (plan.recipe, *plan.recipes):
            assert zoo.drafter_for(f"zoo:{target}", recipes.get(recipe)) == f"zoo:{entry.name}"
    for recipe in ("coupled", "sage", "edgesd", "ibed", "tabed"):
        found = zoo.drafter_for(f"zoo:{target}", recipes.get(recipe))
        assert found == f"zoo:{target}-drafter"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "head"),
    [*((TARGET, head) for head in PLANS), *((QWEN, head) for head in HEADS_OF_QWEN)],
)
def test_a_short_trial_of_each_is_exact_and_described(
    name: str, head: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One step of every stage: it loads, drafts for its recipe, and its card says what it is."""
    entry, plan = entry_of(name, head), PLANS[head]
    shared = tmp_path_factory.getbasetemp() / "shared-answers"
    report = mmspec.zoo.train(entry, tmp_path / head, steps=1, minutes=1.0, answers=shared)
    assert report["steps_of_stages"] == [1] * len(plan.stages)
    assert report["bytes"] < 700_000
    assert set(report["acceptance"]) == {"caption", "question", "all"}
    assert json.loads((tmp_path / head / "measured.json").read_text()) == report
    card = (tmp_path / head / "README.md").read_text()
    assert plan.stages[0].about in card
    assert "| loss curve | " in card
    assert not read_json(tmp_path / head / "config.json").get("_name_or_path")
    target, processor = zoo.load(name), zoo.processor(name)
    one = examples(1, "held-out", 3)[0]
    text = zoo_prompt(processor, one.prompt)
    inputs = processor(text=[text], images=[one.image], return_tensors="pt")
    want = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    fast = mmspec.accelerate(target, plan.recipe, drafter=tmp_path / head)
    out = fast.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert torch.equal(out.sequences, want)
    assert out.stats.fallback is None


def zoo_prompt(processor: Any, prompt: str) -> str:
    """The chat text of a prompt about one picture."""
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    chat = [{"role": "user", "content": content}]
    return str(processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
