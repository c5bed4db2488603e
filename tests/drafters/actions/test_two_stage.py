"""The last action is drafted with the prompt, slots draft the rest: exact within radius 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmspec import recipes
from mmspec.codes.actions import ActionCodes
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Kind
from mmspec.drafters.actions.windows import windows
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.shapes import Chain
from mmspec.modalities.common.tokens import BoundTokens
from mmspec.targets.memory import Memory
from mmspec.targets.tokens import causal, late
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from mmspec.targets.tokens.late import JointPrefill
from tests import toys
from tests.targets.tokens.test_late import forwards
from tests.toys.policies import (
    GREEDY,
    SAMPLED,
    SPACE,
    act,
    build_prompts,
    plain,
    reader,
    remembering,
    robot,
)

NAME = "oft-draft-tolerance"
HIDDEN = frozenset({"hidden"})


def chained(**options: Any) -> BoundTokens:
    """The recipe with chains as drafts."""
    return robot(replace(recipes.get(NAME), execution=Chain(Fixed(64))), **options)


@pytest.fixture(autouse=True)
def _clear_cache() -> Iterator[None]:
    late.clear_cache()
    yield
    late.clear_cache()


def test_windows_hold_the_most_that_is_left_of_a_distribution() -> None:
    """By counting, bin by bin; without a radius they are the likeliest, at the ends they stop."""
    codes, generator = ActionCodes(20, 12), torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 4, 25, generator=generator)
    radii = torch.tensor([0, 1, 3, 12])
    found = windows(logits, codes, radii, 3).exp()
    distribution = logits[..., 8:20].softmax(-1)
    for row in range(2):
        for slot, radius in enumerate(radii.tolist()):
            left, expected = distribution[row, slot].clone(), torch.zeros(25)
            for _ in range(3):
                mass = [float(left[max(x - radius, 0) : x + radius + 1].sum()) for x in range(12)]
                best = mass.index(max(mass))
                expected[best + 8] += mass[best]
                left[max(best - radius, 0) : best + radius + 1] = 0
            torch.testing.assert_close(found[row, slot], expected)
    assert torch.equal(found[:, 0].argmax(-1) - 8, distribution[:, 0].argmax(-1))
    assert bool((found[:, 3] > 0).sum(-1).eq(1).all())  # one window holds all
    shape = torch.tensor([[[0.1, 0.3, 1e-9, 0.2, 0.2, 0.2]]]).log()
    only = windows(shape, ActionCodes(6, 6), torch.tensor([1]), 1).exp()[0, 0].tolist()
    assert only == pytest.approx([0, 0, 0, 0, 0.6, 0], abs=1e-6)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_that_keep_different_numbers_say_what_plain_decoding_says(sampling: Any) -> None:
    """Both ways, then at once; prompts differ in length, one robot is new, and one stands still."""
    expected = plain(4, sampling=sampling)
    bound = robot(NAME, radius=0.0)
    for count in (3, 1):  # forwards until slots are asked: the prompt, its draft, both at once
        done = [[], [expected[1]], [[*expected[2][:4], *expected[1][4:]]], [expected[0]]]
        with forwards(bound.model) as read:
            found, rounds = act(bound, [remembering(one) for one in done], 1, sampling)
        assert found == expected
        assert len(set(rounds[0].accepted)) > 2
        assert len(read) == count + sum(kept.calls for kept in rounds)


def test_an_action_that_passes_costs_the_prompt_alone() -> None:
    (expected,) = plain(1)
    bound = chained(radius=0.0)
    act(bound, [remembering([expected])])  # read both ways
    with forwards(bound.model) as read:
        found, rounds = act(bound, [remembering([expected])])
    assert (found, len(read), len(rounds)) == ([expected], 1, 1)
    wrong = [*expected[:3], *[(one + 40 - 12) % 128 + 12 for one in expected[3:]]]
    with forwards(bound.model) as read:
        found, rounds = act(bound, [remembering([wrong])])
    assert found == [expected]
    assert rounds[0].accepted == (3,)
    assert rounds[1].drafted == (2,)  # four are said; the last one is the policy's own
    assert read[1:] == [1 + kept.drafted[0] for kept in rounds[1:]]


def test_a_robot_that_did_nothing_yet_is_drafted_for_by_slots() -> None:
    for bound, drafted in ((chained(radius=0.0), 5), (robot(NAME, radius=0.0), 24)):
        found, rounds = act(bound, [remembering([])])
        assert found == plain(1)
        assert [kept.drafted for kept in rounds[:2]] == [(0,), (drafted,)]
        assert rounds[0].calls == 0


def prefill(rows: int) -> tuple[CausalTarget, Context]:
    target = CausalTarget(
        reader("llava"),
        HIDDEN,
        checks=False,
        defers_prefill=True,
        joins_prefill=True,
        deferred_features=HIDDEN,
    )
    noise = KeyedNoise.from_seed(0, rows, torch.device("cpu"))
    return target, target.prefill(Request(build_prompts(0, rows), Sampling(), noise, 8))


@torch.no_grad()
def prefill_features(rows: int) -> tuple[Any, Any]:
    """What a prompt read with a draft, or before it, offers; and the states of the draft."""
    target, context = prefill(rows)
    drafted = torch.tensor([[30, 40, 50]] * rows)
    scores = target.score(context, Draft.chain(drafted, Kind.DET))
    return context.shared, scores.features["hidden"]


@pytest.mark.parametrize("rows", [1, 3])
def test_states_of_a_prompt_are_those_without_the_draft_behind_it(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (apart, before), (together, behind) = prefill_features(rows), prefill_features(rows)
    seen = build_prompts(0, rows)["attention_mask"].bool()
    for name in ("hidden", "embeds"):
        assert together[name].shape == apart[name].shape
        torch.testing.assert_close(together[name][seen], apart[name][seen], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(behind, before, atol=1e-4, rtol=1e-4)
    own = causal._share_states
    monkeypatch.setattr(causal, "_share_states", lambda offer, states, nodes: own(offer, states, 1))
    assert (
        prefill_features(rows)[0]["hidden"].shape != apart["hidden"].shape
    )  # two of the draft are there


def test_a_draft_left_in_the_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what the tests above would say of a draft that stays in the memory."""
    bound = robot(NAME, radius=0.0)

    def is_reproduced(scene: int) -> bool:
        (expected,) = plain(1, scene=scene)
        done = remembering([[expected[0], *expected[:6]]])
        return act(bound, [done], scene=scene)[0] == [expected]

    assert all(is_reproduced(scene) for scene in (0, 0, 1, 2))
    own = Memory.advance

    def keep_draft(self: Memory, steps: list[int]) -> None:
        own(self, [max(step, -1) for step in steps])

    monkeypatch.setattr(Memory, "advance", keep_draft)
    assert not all(is_reproduced(scene) for scene in (0, 1, 2))


def test_a_prompt_that_sees_its_draft_is_found() -> None:
    """PaliGemma's prefix would read the draft: it is read before, and stays exact."""
    target = reader("paligemma")
    noise = KeyedNoise.from_seed(0, 1, torch.device("cpu"))
    request = Request(toys.inputs("paligemma", 0, 1), Sampling(), noise, 8)
    made = CausalTarget(
        target,
        HIDDEN,
        checks=False,
        defers_prefill=True,
        joins_prefill=True,
        deferred_features=HIDDEN,
    )
    draft = Draft.chain(torch.tensor([[30, 40, 50]]), Kind.DET)
    with torch.no_grad():
        calls = [made.score(made.prefill(request), draft).calls for _ in range(2)]
    assert calls == [0, 1]  # compared, and then read before
    drafted = JointPrefill.from_request(target, request, draft)
    assert drafted is not None
    assert drafted.is_trusted is False


def test_a_component_passes_by_its_own_distance() -> None:
    """Every kept number lies within the radius of what the policy says behind those before it."""
    bound = robot(NAME, radius=9.0)
    (expected,) = plain(1)
    near = [one + (5 if one < 130 else -5) for one in expected[:6]] + expected[6:]
    found, rounds = act(bound, [remembering([near])])
    assert found[0][0] == near[0] != expected[0]
    assert rounds[0].accepted[0] >= 1
    assert SPACE.dims[6].group == "gripper"
    assert not bound.recipe.exact


def test_states_that_are_wanted_before_are_refused() -> None:
    with pytest.raises(ValueError, match="needs hidden of the prompt"):
        CausalTarget(reader("llava"), HIDDEN, defers_prefill=True)
