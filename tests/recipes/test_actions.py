"""Recipes of robot actions: exact ones say what plain decoding says, lossy ones within bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec import recipes
from mmspec.bench import certify
from mmspec.codes.episodes import Episode
from mmspec.modalities.common import tokens
from tests.covering import covering, exhaustive, limited
from tests.toys.policies import (
    GREEDY,
    SAMPLED,
    SPACE,
    act,
    drafter_for,
    plain,
    reader,
    remembering,
    robot,
)

NAMES = recipes.names("actions")
WAYS: dict[str, Any] = {"greedy": GREEDY, "sampled": SAMPLED}
# what makes a lossy recipe exact
NEUTRAL: dict[str, dict[str, Any]] = {
    "hold-last-tolerance": {"radius": 0.0},
    "oft-draft-tolerance": {"radius": 0.0},
    "spec-vla": {"radius": 0.0},
    "kerv": {"least": 0.0, "most": 0.0, "lockout": float("inf")},
    "heisd": {"bias": 0.0, "radius": 0.0, "theta": 2.0, "delta": 0.0},
}


def histories(wanted: list[int], seed: int = 0) -> list[Episode]:
    """Robots that know nothing, anything, something near, and the very action, long ago, too."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(12, 140, (4, SPACE.size), generator=generator)
    moves = torch.randint(-4, 5, (6, SPACE.size), generator=generator)
    near = (torch.tensor(wanted) + moves).clamp(12, 139)
    quick = torch.tensor(wanted).repeat(16, 1)
    return [Episode(SPACE), remembering(noise), remembering(near), remembering(quick)]


@pytest.mark.parametrize(("name", "way"), limited(covering(NAMES, tuple(WAYS), strength=1), 6))
def test_exact_recipes_say_what_plain_decoding_says(name: str, way: str) -> None:
    """Exact as they are, or at the neutral value of their options; lossy ones differ somewhere."""
    plan, sampling = recipes.get(name), WAYS[way]
    for scene in range(2):
        wanted = plain(4, sampling=sampling, scene=scene)
        if plan.exact or name in NEUTRAL:
            bound = robot(name, **NEUTRAL.get(name, {}))
            assert bound.verifier.lossless
            found, _ = act(bound, histories(wanted[3]), 1, sampling, scene=scene)
            assert found == wanted
    if not plan.exact:
        bound = robot(name)
        told = [plain(4, sampling=sampling, scene=scene) for scene in range(4)]
        said = [
            act(bound, histories(one[3], scene), 1, sampling, scene=scene)[0]
            for scene, one in enumerate(told)
        ]
        assert said != told
        assert not bound.recipe.exact


@pytest.mark.parametrize("name", exhaustive(NAMES, [*NAMES][::2]))
def test_answers_of_two_actions_are_whole(name: str) -> None:
    found, _ = act(robot(name), histories(plain(1)[0]), 2)
    assert [len(row) for row in found] == [14] * 4


@pytest.mark.parametrize("name", [name for name in NAMES if name != "openvla-ar"])
def test_a_model_that_is_no_policy_is_refused(name: str) -> None:
    plan = recipes.get(name)
    with pytest.raises(
        ValueError, match="needs an action space, and the model has none; give actions="
    ):
        tokens.bind(reader("llava"), plan, drafter_for(plan), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "specprune-vla"])
def test_a_certificate_says_what_a_recipe_says(name: str) -> None:
    """On tiny policies, whose distributions are counted; without a picture nothing is pruned."""
    found = certify(recipes.get(name), seeds=3, samples=1000)
    assert "refuted" not in {check.outcome for check in found.checks}
    if recipes.get(name).exact:
        assert found.verdict == "exact"
