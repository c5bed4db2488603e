"""The benchmark of picture tokens, on tiny models: counts and likelihoods that are known."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
import torch

import mmspec
from mmspec.bench import Comparison, compare
from mmspec.modalities.common.measures import facts_quality, held_out_prompts, score_images
from mmspec.modalities.image.measures import log_likelihood, of_requests
from tests.covering import covering, limited
from tests.modalities import drawing
from tests.toys import image_models, processors

CODES = image_models.SIDE**2
SETTINGS: dict[str, Any] = {"temperature": 1.0, "guidance": 3.0}
CIRCLE = {"prompt": ["a red circle"], **SETTINGS}
FAMILIES = tuple(image_models.PAINTERS)


@lru_cache(maxsize=8)
def model(family: str) -> Any:
    return image_models.PAINTERS[family]()


def compared(*recipes: str, judged: Any = (), qualities: Any = (), **more: Any) -> Comparison:
    ways, processor = {}, processors.janus()
    for name in recipes:
        small = drawing.noisy("janus") if mmspec.recipes.get(name).takes_drafter else None
        made = mmspec.accelerate(model("janus"), name, drafter=small, processor=processor)
        ways[name] = made
    work = of_requests(model("janus"), [CIRCLE], judged, qualities, processor=processor)
    return compare("janus", ways, work, repeats=1, **more)


def test_plain_is_the_first_row_and_exact_recipes_are_counted_against_it() -> None:
    found = compared("coupled", "sjd", controls=True)
    document = json.loads(json.dumps(found.to_dict()))
    assert [row["recipe"] for row in document["rows"]] == ["plain", "coupled", "sjd"]
    plain, coupled, sjd = found.rows
    assert (plain.calls, plain.fewer_calls, plain.speedup_over_plain) == (CODES - 1, 1, 1)
    assert coupled.calls is not None
    assert coupled.fewer_calls == (CODES - 1) / coupled.calls > 1
    likely = [row.qualities["log likelihood"]["value"] for row in found.rows]
    assert likely[1] == pytest.approx(likely[0])  # the same picture
    assert likely[2] != likely[0]  # another one
    assert sjd.exact
    assert (sjd.distance, sjd.identical, list(sjd.qualities)) == (None, None, ["log likelihood"])
    for name in ("speedup_over_plain", "speedup_end_to_end"):  # Janus has a loop of its own
        assert sjd.spread[name][0] <= getattr(sjd, name) <= sjd.spread[name][1]
    assert sjd.speedup_decode is None
    assert (found.row("generate").qualities["log likelihood"]["value"] or 0) < 0
    assert (found.settings["codes"], found.judged, found.requests) == (CODES, 1, 1)
    shares = (sjd.draft_share, sjd.verify_share, sjd.host_share)
    assert 0 < sum(share or 0 for share in shares) < 1
    assert 0 < (sjd.engine_efficiency or 0) < 1.2
    assert found.controls[0].exact
    assert (found.controls[0].fewer_calls or 0) >= 1


def test_relaxed_recipes_say_what_they_lose() -> None:
    found = compared("lantern", peers=False, efficiency=False)
    assert not found.rows[1].exact
    assert found.rows[1].distance is not None
    assert found.rows[1].engine_efficiency is None


def test_pictures_are_judged_in_order_and_against_plain() -> None:
    shown: list[list[Any]] = []

    def judge(drawn: Any) -> list[tuple[int, int]]:
        if drawn not in shown:
            shown.append(drawn)
        return [(shown.index(drawn) + 1, 4)] * len(drawn)  # 1 of 4 for the first to be looked at

    judged = [{**CIRCLE, "prompt": ["a blue square", "a small circle"]}]
    quality = facts_quality(judge)
    found = compared("sjd", judged=judged, qualities=(quality,), efficiency=False)
    assert [len(drawn) for drawn in shown] == [2, 2, 2]
    plain, sjd = (row.qualities["facts right"] for row in found.rows)
    assert (plain["value"], plain["gap"]) == (0.25, 0)
    assert (sjd["value"], sjd["gap"], sjd["gap_error"]) == (0.5, 0.25, 0)
    assert found.row("generate").qualities["facts right"]["gap"] == 0.5


def test_a_model_without_its_own_loop_is_reported() -> None:
    toy = model("llamagen-class")
    work = of_requests(toy, [{"class_ids": [2], **SETTINGS}])
    found = compare("l", {"sjd": mmspec.accelerate(toy, "sjd")}, work, repeats=1, efficiency=False)
    assert "has no image generation loop of its own" in str(found.row("generate").skipped)
    assert found.rows[1].speedup_end_to_end is None
    assert found.rows[1].speedup_over_plain is not None


@pytest.mark.parametrize(
    ("scale", "family"), limited(covering([1.0, 3.0], FAMILIES, strength=1), 3)
)
@torch.no_grad()
def test_likelihoods_are_those_of_distributions_from_scratch(family: str, scale: float) -> None:
    toy = model(family)
    fast = mmspec.accelerate(toy, "plain")
    asked = {**image_models.request(family, 2), **drawing.sized(family)}
    out = fast.generate_images(**asked, temperature=1.3, guidance=scale, top_k=9, seed=2)
    made = fast.session.prepare_request(**asked, temperature=0.7, guidance=scale, top_k=9)
    found = log_likelihood(fast, made, out.sequences)
    allowed = made.grid.ids()
    other: Any = made.inputs.get("negative")
    for row in range(2):
        total = 0.0
        for offset, token in enumerate(out.sequences[row].tolist()):
            if made.grid.cell_at(offset) is None:
                continue
            new = out.sequences[row, :offset]
            logits = drawing.logits_of(toy, family, made.inputs, row, new)
            if scale != 1:
                uncond = drawing.logits_of(toy, family, other, row, new)
                logits = uncond + scale * (logits - uncond)
            distribution = (logits[allowed] / 0.7).log_softmax(-1)
            total += float(distribution[allowed == token])
        assert float(found[row]) == pytest.approx(total / made.grid.cells, abs=1e-4)


def test_the_scene_world_judges_its_own_pictures() -> None:
    groups, scenes = held_out_prompts(5, 2, seed=3)
    assert [len(group) for group in groups] == [2, 2]
    drawn = [scene.render(72) for scene in scenes]
    scored = score_images(scenes, drawn)
    assert all(right == asked > 0 for right, asked in scored)
    swapped = score_images(scenes, drawn[2:] + drawn[:2])
    assert sum(right for right, _ in swapped) < sum(asked for _, asked in swapped)
