"""A pool never changes the output, and finds the drafter that the text of a request needs."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch

import mmspec
from mmspec.draft import Draft, Kind
from mmspec.drafters.lookup.token_recycling import TokenRecycling
from mmspec.drafters.oracle import Oracle, RandomDrafter
from mmspec.drafters.pool import DrafterPool, match_paths
from mmspec.drafters.selectors import ArmCounts, Exp3, Hedge, Selector, UpperConfidence
from mmspec.trees import Tree
from tests import toys
from tests.covering import limited
from tests.drafters.driving import drive, greedy, inputs, tiny
from tests.partners import noisy

ROUNDS = 600


@dataclass(frozen=True)
class TotalCount(UpperConfidence):
    """The wrong variant of the released code: the bonus is the same for all arms."""

    def choose(self, counts: ArmCounts) -> int:
        if min(counts.pulls) < 2:
            return counts.pulls.index(min(counts.pulls))
        means = [total / pulls for total, pulls in zip(counts.sums, counts.pulls, strict=True)]
        return means.index(max(means))


def regret(selector: Selector, changes: bool, seed: int) -> float:
    """Mean reward lost to the best arm of each domain; an arm is right with its probability."""
    random, counts, lost = Random(seed), ArmCounts.begin(3), 0.0
    for step in range(ROUNDS):
        chances = [0.2, 0.5, 0.6]
        if changes and step >= ROUNDS // 2:
            chances = chances[::-1]
        rewards = [float(random.random() < chance) for chance in chances]
        arm = selector.choose(counts)
        selector.observe(counts, arm, rewards)
        lost += max(chances) - chances[arm]
    return lost / ROUNDS


def mean_regret(selector: Selector, changes: bool) -> float:
    return sum(regret(selector, changes, seed) for seed in range(30)) / 30


def test_regret_is_lowest_where_all_losses_are_known() -> None:
    uniform = 0.6 - 1.3 / 3
    for changes in (False, True):
        known = mean_regret(Hedge(), changes)
        assert known < 0.5 * mean_regret(Exp3(), changes)
        assert known < 0.3 * uniform
    assert mean_regret(UpperConfidence(), False) < 0.4 * uniform
    assert mean_regret(Exp3(), True) < uniform


def test_the_bonus_of_the_released_code_explores_no_more() -> None:
    """Two unlucky pulls, and the best arm is never tried again."""
    good, bad = (
        [regret(one, False, seed) for seed in range(200)]
        for one in (UpperConfidence(), TotalCount())
    )
    assert sum(bad) > 1.5 * sum(good)
    assert max(bad) > 0.39  # stuck with the worst arm for the whole run
    assert max(good) < 0.2


def test_hedge_finds_the_perfect_drafter_geometrically() -> None:
    counts, selector = ArmCounts.begin(2), Hedge(eta=0.5, share=0.0)
    for _ in range(10):
        selector.observe(counts, 0, [0.0, 1.0])
    assert counts.sums[1] - counts.sums[0] == pytest.approx(0.5 * 10)


def test_the_path_that_the_text_took() -> None:
    tree = Tree((-1, -1, 1, 1, 2))
    tokens = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9]])
    mask = torch.tensor([[True] * 5, [True, False, True, True, True]])
    draft = Draft.from_tree(tree, tokens, Kind.DET, mask=mask)
    assert match_paths(draft, [(6, 7, 9, 1), (6, 7)]) == ((1, 2, 4), ())
    assert match_paths(draft, [(6, 8, 9), (5,)]) == ((1, 3), (0,))
    assert match_paths(Draft.empty(2, tokens.device), [(1,), ()]) == ((), ())


@pytest.mark.parametrize("selector", [Hedge(), UpperConfidence(), Exp3()], ids=repr)
def test_it_settles_on_the_arm_that_is_right(selector: Selector) -> None:
    model, prompt, room = tiny(), inputs((0, 4)), 40
    expected = greedy(model, prompt, room)
    arms = [RandomDrafter(tree=4), Oracle(expected, tree=4, corruption=0.1), RandomDrafter(tree=4)]
    pool = DrafterPool(arms, selector, longest=4, fresh=False)
    found, _ = drive(model, pool, prompt, room)
    assert found == expected
    assert drive(model, pool, prompt, room)[0] == expected
    pulls = pool._counts.pulls
    assert pulls[1] == max(pulls)
    assert sum(pulls) > 15


def test_searches_learn_from_the_drafts_of_others() -> None:
    """Token recycling is empty at first; it is chosen once what it would have drafted is right."""
    model, prompt, room = tiny(), inputs(), 60
    arms = [RandomDrafter(tree=2), TokenRecycling()]
    pool = DrafterPool(arms, Hedge(), longest=3, fresh=False)
    assert drive(model, pool, prompt, room)[0] == greedy(model, prompt, room)
    assert pool._counts.pulls[1] > pool._counts.pulls[0] > 0


NAMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("pool", {}),
    ("pool", {"selector": "ucb", "arms": ("coupled", "dynamic-tree", "token-recycling")}),
    ("pool", {"selector": "hedge", "arms": ("coupled", "dynamic-tree", "lookahead")}),
    ("pool-lookup", {"selector": "exp3", "arms": ("suffix", "lookahead", "prompt-lookup")}),
)


@pytest.mark.parametrize(("name", "options"), limited(NAMED, 2), ids=str)
def test_a_pool_is_exact(name: str, options: dict[str, Any]) -> None:
    model = toys.model("llava")
    drafter = noisy("llava", scale=0.08) if name == "pool" else None
    fast = mmspec.accelerate(model, name, drafter=drafter, **options)
    request = toys.inputs("llava", batch=3, ragged=True)
    for settings in ({"do_sample": False}, {"temperature": 1.0, "seed": 4}):
        out = fast.generate(**request, max_new_tokens=24, **settings)
        plain = mmspec.decode_plain(model, **request, max_new_tokens=24, **settings)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences, plain.sequences)


def test_what_makes_no_pool_is_refused() -> None:
    model = toys.model("llama")
    for name, options, message in (
        ("pool-lookup", {"selector": "best"}, "selector='best' is not known; choose one of hedge"),
        ("pool-lookup", {"arms": ("suffix",)}, "a pool of 1 drafters leaves no choice"),
        ("pool-lookup", {"arms": ("suffix", "block")}, "recipe 'block' cannot be an arm"),
        ("pool-lookup", {"arms": ("suffix", "coupled")}, "the arm 'coupled' needs a draft model"),
        ("pool-lookup", {"length": 3}, "have their own shapes"),
        ("pool-lookup", {"verifier": "rejection"}, "draws RACE; choose another verifier"),
    ):
        with pytest.raises(ValueError, match=message):
            mmspec.accelerate(model, name, **options)
