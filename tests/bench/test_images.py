"""The benchmark of picture tokens, on tiny models: counts and likelihoods that are known."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
import torch

import mmspec
from mmspec.bench.gallery import Gallery
from mmspec.bench.images import ImageComparison, compare_images
from mmspec.bench.likelihood import log_likelihood
from mmspec.bench.scenes import facts, facts_right, from_zoo
from tests.modalities import drawing
from tests.toys import painters, speaking

CODES = painters.SIDE**2
SETTINGS: dict[str, Any] = {"temperature": 1.0, "guidance": 3.0}
FAMILIES = tuple(painters.PAINTERS)


@lru_cache(maxsize=8)
def model(family: str) -> Any:
    return painters.PAINTERS[family]()


def compared(*recipes: str, gallery: Gallery | None = None, **more: Any) -> ImageComparison:
    ways = {}
    for name in recipes:
        small = drawing.noisy("janus") if mmspec.recipes.get(name).takes_drafter else None
        made = mmspec.accelerate(model("janus"), name, drafter=small, processor=speaking.janus())
        ways[name] = made
    gallery = gallery or Gallery([{"prompt": ["a red circle"]}])
    return compare_images(ways, gallery, SETTINGS, repeats=1, **more)


def test_plain_is_the_first_row_and_exact_recipes_are_counted_against_it() -> None:
    found = compared("coupled", "sjd")
    document = json.loads(json.dumps(found.to_dict()))
    assert [row["recipe"] for row in document["rows"]] == ["plain", "coupled", "sjd"]
    plain, coupled, sjd = found.rows
    assert (plain.calls, plain.fewer_calls, plain.speedup_over_plain) == (CODES - 1, 1, 1)
    assert coupled.fewer_calls == (CODES - 1) / coupled.calls > 1
    assert coupled.log_likelihood == pytest.approx(plain.log_likelihood)  # the same picture
    assert sjd.log_likelihood != plain.log_likelihood  # another one
    assert sjd.exact
    assert (sjd.over_accepted_mass, sjd.facts_right, sjd.facts_gap) == (None, None, None)
    assert sjd.spread["plain"][0] <= sjd.speedup_over_plain <= sjd.spread["plain"][1]
    assert sjd.speedup_over_generate is not None  # Janus has a loop of its own
    assert found.generate["log_likelihood"] < 0
    assert (found.codes, found.pictures, found.requests) == (CODES, 1, 1)
    shares = (sjd.draft_share, sjd.verify_share, sjd.host_share)
    assert 0 < sum(shares) < 1
    assert sjd.engine_efficiency is not None
    assert 0 < sjd.engine_efficiency < 1.2


def test_relaxed_recipes_say_what_they_lose() -> None:
    found = compared("lantern", peers=False, efficiency=False)
    assert not found.rows[1].exact
    assert found.rows[1].over_accepted_mass is not None
    assert found.generate == {"skipped": "not asked for"}
    assert found.rows[1].engine_efficiency is None


def test_pictures_are_judged_in_order_and_against_plain() -> None:
    shown: list[int] = []

    def judge(drawn: Any) -> list[tuple[int, int]]:
        shown.append(len(drawn))
        return [(2 - len(shown) % 2, 4)] * len(drawn)  # 1 of 4 for the first, 2 of 4 for the next

    timed = [{"prompt": ["a red circle"]}]
    judged = [{"prompt": ["a blue square", "a small circle"]}]
    gallery = Gallery(timed, judged, judge)
    found = compared("sjd", gallery=gallery, peers=False, efficiency=False)
    assert shown == [2, 2]
    plain, sjd = found.rows
    assert (plain.facts_right, plain.facts_gap) == (0.25, 0)
    assert (sjd.facts_right, sjd.facts_gap, sjd.facts_gap_error) == (0.5, 0.25, 0)
    assert found.pictures == 2


def test_a_model_without_a_loop_of_its_own_says_so() -> None:
    ways = {"sjd": mmspec.accelerate(model("llamagen-class"), "sjd")}
    gallery = Gallery([{"class_ids": [2]}])
    found = compare_images(ways, gallery, SETTINGS, repeats=1, efficiency=False)
    assert "has no loop of its own" in found.generate["skipped"]
    assert found.rows[1].speedup_over_generate is None


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_likelihoods_are_those_of_laws_from_scratch(family: str, scale: float) -> None:
    toy = model(family)
    fast = mmspec.accelerate(toy, "plain")
    asked = {**painters.request(family, 2), **drawing.sized(family)}
    out = fast.generate_images(**asked, temperature=1.3, guidance=scale, top_k=9, seed=2)
    made = fast.session.drawing(**asked, temperature=0.7, guidance=scale, top_k=9)
    found = log_likelihood(fast, made, out.sequences)
    allowed = made.grid.ids()
    other: Any = made.inputs.get("negative")
    for row in range(2):
        total = 0.0
        for offset, token in enumerate(out.sequences[row].tolist()):
            if made.grid.cell(offset) is None:
                continue
            new = out.sequences[row, :offset]
            logits = drawing.logits_of(toy, family, made.inputs, row, new)
            if scale != 1:
                uncond = drawing.logits_of(toy, family, other, row, new)
                logits = uncond + scale * (logits - uncond)
            law = (logits[allowed] / 0.7).log_softmax(-1)
            total += float(law[allowed == token])
        assert float(found[row]) == pytest.approx(total / made.grid.cells, abs=1e-4)


def test_the_scene_world_judges_its_own_pictures() -> None:
    groups, scenes = from_zoo(5, 2, seed=3)
    assert [len(group) for group in groups] == [2, 2]
    drawn = [scene.render(72) for scene in scenes]
    scored = facts(scenes, drawn)
    assert all(right == asked > 0 for right, asked in scored)
    assert facts_right(scenes, [drawn[:2], drawn[2:]]) == 1
    assert facts_right(scenes, [drawn[2:], drawn[:2]]) < 1
