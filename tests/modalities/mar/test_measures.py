"""The benchmark of continuous tokens, on tiny models."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest

from mmspec.api import accelerate
from mmspec.bench import compare
from mmspec.modalities.common.measures import facts_quality
from mmspec.modalities.mar.measures import of_requests
from tests.toys.mar import mar

VAE = SimpleNamespace(decode=lambda latents: latents.repeat(1, 2, 1, 1)[:, :3])
SETTINGS: dict[str, Any] = {"steps": 6, "head_steps": 3, "guidance": 1.5, "last_noise": True}


def make_request(*classes: int, **more: Any) -> dict[str, Any]:
    return {"class_labels": list(classes), **SETTINGS, **more}


@pytest.mark.exhaustive
def test_recipes_beside_plain_and_wider_steps() -> None:
    model = mar()
    ways = {
        "cspd-coupled": accelerate(model, drafter=copy.deepcopy(model), length=2),
        "cspd": accelerate(model, "cspd", drafter=mar(1), length=3, prefill=0),
    }
    seen: list[int] = []

    def judge(images: Any) -> list[tuple[int, int]]:
        seen.append(len(images))
        return [(index % 2, 1) for index, _ in enumerate(images)]

    timed, judged = (
        [make_request(0, vae=VAE), make_request(3, vae=VAE)],
        [make_request(0, 1, 2, vae=VAE)],
    )
    work = of_requests(model, timed, judged, (facts_quality(judge),))
    found = compare("m", ways, work, drafters={"cspd": "d"}, repeats=2)
    assert [one.recipe for one in found.rows] == ["plain", "cspd-coupled", "cspd"]
    plain, coupled, cspd = found.rows
    assert (plain.calls, plain.speedup_over_plain, plain.exact) == (6, 1, True)
    assert (coupled.calls, coupled.exact) == (2, True)  # a copy: two steps and one more, twice
    assert (coupled.draft_acceptance_rate, coupled.mean_acceptance_length) == (1, 3)
    assert (cspd.exact, cspd.drafter) == (False, "d")
    wide = found.row("plain, 2 steps")
    assert (wide.calls, wide.exact, wide.fewer_calls) == (2, False, 3)
    everybody = [*found.rows, *found.baselines]
    assert set(seen) == {3}
    for one in everybody:
        assert one.qualities["facts right"]["value"] == pytest.approx(1 / 3)
        assert one.qualities["facts right"]["gap"] == 0
        assert (one.speedup_end_to_end, one.engine_efficiency) == (None, None)
    document = json.loads(json.dumps(found.to_dict()))
    assert document["settings"]["steps"] == 6
    assert (found.judged, found.modality) == (1, "mar")


def test_nothing_is_judged_without_a_judge() -> None:
    model = mar()
    ways = {"cspd-coupled": accelerate(model, drafter=mar(1), length=1)}
    found = compare("m", ways, of_requests(model, [make_request(2)]), repeats=1, peers=False)
    assert found.rows[0].qualities == {}
    assert found.baselines == []
