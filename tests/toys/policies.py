"""Tiny policies: toys whose last ids are actions, asked for an action, with episodes of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmspec import recipes
from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.codes.trajectories import Trajectories
from mmspec.decode import decode
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Round
from mmspec.drafters.actions.retrieval import features_of
from mmspec.modalities.common import tokens
from mmspec.models.heads.feature_head import FeatureHead
from mmspec.recipe import Recipe
from mmspec.targets.stop import Stop
from tests import toys
from tests.drafters.heads import untrained_head
from tests.toys.readers import backbone

SPACE = ActionSpace.from_statistics(
    {
        "q01": [-0.02, -0.03, -0.04, -0.1, -0.2, -0.3, 0.0],
        "q99": [0.02, 0.05, 0.03, 0.1, 0.1, 0.3, 1.0],
        "mask": [True] * 6 + [False],
    },
    ActionCodes(140, 128),
)
SCENES = range(4)  # that are stored
GREEDY, SAMPLED = Sampling(), Sampling(do_sample=True, temperature=0.8)


@cache
def reader(family: str) -> Any:
    return backbone(toys.model(family, layers=3))


@cache
def head(family: str = "llava") -> FeatureHead:
    """A feature head of the family's toy that knows nothing."""
    return untrained_head(toys.model(family, layers=3))


def drafter_for(plan: Recipe, family: str = "llava") -> Any:
    """A draft model of a sort that a recipe takes, if it takes any; it knows nothing."""
    own = head(family)
    if not plan.draft_model or any(kind.accepts(own) for kind in plan.draft_model):
        return own if plan.draft_model else None
    return plan.draft_model[0].random(reader(family), 0)


def robot(
    recipe: str | Recipe, drafter: Any = None, family: str = "llava", **options: Any
) -> tokens.BoundTokens:
    """A toy bound to a recipe of actions."""
    plan = recipes.get(recipe) if isinstance(recipe, str) else recipe
    drafter = drafter_for(plan, family) if drafter is None else drafter
    if "store" in plan.options:
        options = {"store": store(), **options}
    plan = replace(plan, options={**plan.options, **options})
    return tokens.bind(reader(family), plan, drafter, {"actions": SPACE, "check": False})


def build_prompts(scene: int, count: int, family: str = "llava") -> dict[str, Tensor]:
    """The first of four prompts, which differ in length; a row does not depend on their number."""
    four = toys.inputs(family, scene, 4, ragged=True)
    return {name: one[:count] for name, one in four.items()}


def act(
    bound: tokens.BoundTokens,
    episodes: Sequence[Episode],
    actions: int = 1,
    sampling: Sampling = GREEDY,
    seed: int = 3,
    scene: int = 0,
    family: str = "llava",
) -> tuple[list[list[int]], list[Round]]:
    """The ids of the next actions per row, and the rounds that they took; rows differ in length."""
    request = build_prompts(scene, len(episodes), family)
    stop = Stop(actions * SPACE.size)
    with torch.no_grad():
        call = bound.call(request, sampling, stop, seed, shared={"episodes": episodes})
        rounds = list(decode(call.parts, call.request))
    rows: list[list[int]] = [[] for _ in episodes]
    for round_ in rounds:
        assert round_.fallback is None, round_.fallback
        for row, new in zip(rows, round_.tokens, strict=True):
            row.extend(new)
    return rows, rounds


@cache
def plain(count: int, **settings: Any) -> list[list[int]]:
    """What plain decoding says; not to be changed."""
    found, _ = act(robot("openvla-ar"), [Episode(SPACE) for _ in range(count)], **settings)
    return found


def remembering(actions: Sequence[Sequence[int]] | Tensor) -> Episode:
    """A robot that carried out the actions of these ids (n, D)."""
    episode = Episode(SPACE)
    for row in torch.as_tensor(actions).reshape(-1, SPACE.size):
        episode.observe(SPACE.decode(row))
    return episode


@cache
def store(moments: int = 24, episodes: int = 3) -> Trajectories:
    """What plain decoding does on some scenes, and random walks between: of several episodes."""
    generator = torch.Generator().manual_seed(7)
    drawn = []
    for number in range(episodes):
        walk = torch.randint(-3, 4, (moments, SPACE.size), generator=generator).cumsum(0) + 76
        ids, seen = walk.clamp(12, 139), torch.randn(moments, 64, generator=generator)
        for at, scene in enumerate(SCENES[number::episodes]):
            ids[at] = torch.tensor(plain(1, scene=scene)[0])
            seen[at] = features_of(reader("llava"), build_prompts(scene, 1))[0]
        drawn.append((seen, SPACE.decode(ids), None))
    return Trajectories.from_episodes(drawn)
