"""The oracle has the requested accuracy; random drafts do not change the output."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmspec.drafters.oracle import Oracle, RandomDrafter
from mmspec.trees import Tree
from tests.covering import covering
from tests.drafters.driving import context, count_accepted, drive, greedy, inputs, tiny

TREES = [Tree.chain(4), Tree.branching([3, 2, 1]), Tree.branching([2, 2, 2])]
ROOM = 30


@pytest.mark.parametrize(
    ("corruption", "tree", "padding"),
    covering((0.0, 0.3, 1.0), TREES, ((0, 3, 5), (0,)), strength=1),
)
def test_greedy_decoding_is_unchanged(
    padding: tuple[int, ...], tree: Tree, corruption: float
) -> None:
    model, prompt = tiny(), inputs(padding)
    answers = greedy(model, prompt, ROOM)
    text, rounds = drive(model, Oracle(answers, corruption, tree), prompt, ROOM)
    assert text == answers
    if corruption == 1:
        assert count_accepted(rounds) == 0
    elif corruption == 0 and tree.is_chain:
        assert len(rounds) == 1 + -(-(ROOM - 1) // (tree.depth + 1))
    else:
        assert count_accepted(rounds) > 0


def test_trees_are_walked_off_their_first_path() -> None:
    model, prompt = tiny(), inputs((0, 3))
    oracle = Oracle(greedy(model, prompt, ROOM), tree=TREES[2], spread=0.7)
    _, rounds = drive(model, oracle, prompt, ROOM)
    paths = [path for turn in rounds for path in turn.path if path]
    assert {path[0] for path in paths} == {0, 1}
    oracle = Oracle(greedy(model, prompt, ROOM), tree=TREES[2], spread=0)
    _, rounds = drive(model, oracle, prompt, ROOM)
    assert all(path[0] == 0 for turn in rounds for path in turn.path if path)


@pytest.mark.parametrize("corruption", [0.0, 0.2, 0.6])
def test_the_share_of_wrong_tokens(corruption: float) -> None:
    # 4 000 places: a share off by 0.04 is more than five standard deviations
    now = context([1], room=5000)
    row = Oracle([[7] * 4000], corruption).begin(now)[0]
    assert sum(hint.is_wrong for hint in row) / 4000 == pytest.approx(corruption, abs=0.04)
    ranks = [hint.rank for hint in row]
    assert ranks.count(0) / 4000 == pytest.approx(0.5, abs=0.04)
    assert ranks.count(1) / 4000 == pytest.approx(0.25, abs=0.04)


def test_a_place_does_not_depend_on_how_it_is_reached() -> None:
    now = context([1, 2], room=50)
    answers = [list(range(1, 21))]
    oracle = Oracle(answers, 0.5, tree=6, seed=3)
    state = oracle.begin(now)
    first = oracle.propose(now, state).tokens[0].tolist()
    later = replace(now, history=([1, 2, 1, 2],))
    assert oracle.propose(later, state).tokens[0, :4].tolist() == first[2:]
    assert Oracle(answers, 0.5, tree=6, seed=4).begin(now) != state


def test_siblings_differ_and_the_right_one_is_there_once() -> None:
    now = context([1], room=50)
    oracle = Oracle([[9, 8, 7]], tree=Tree.branching([4, 3]))
    tokens = oracle.propose(now, oracle.begin(now)).tokens[0].tolist()
    assert tokens[:4].count(9) == 1
    assert len(set(tokens[:4])) == 4
    for start in range(4, 16, 3):
        assert tokens[start : start + 3].count(8) == 1
        assert len(set(tokens[start : start + 3])) == 3


@pytest.mark.parametrize(("tree", "sampled"), covering(TREES, [False, True], strength=1), ids=str)
def test_random_drafts_change_nothing(tree: Tree, sampled: bool) -> None:
    model, prompt = tiny(), inputs((0, 3, 5))
    plain, _ = drive(model, RandomDrafter(tree=0), prompt, ROOM, do_sample=sampled)
    text, rounds = drive(model, RandomDrafter(tree=tree), prompt, ROOM, do_sample=sampled)
    assert text == plain
    assert len({turn.depth for turn in rounds}) > 1


def test_random_drafts_differ_between_rounds_and_seeds_only() -> None:
    now = context([1], [2])
    drafter = RandomDrafter(vocabulary=40, tree=8)
    state = drafter.begin(now)
    tokens = drafter.propose(now, state).tokens
    assert tokens.min() >= 0
    assert tokens.max() < 40
    assert drafter.propose(now, state).tokens.equal(tokens)
    assert not drafter.propose(now.at_round(1), state).tokens.equal(tokens)
    other = RandomDrafter(vocabulary=40, tree=8, seed=1)
    assert not other.propose(now, other.begin(now)).tokens.equal(tokens)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="corruption=2"):
        Oracle([[1]], corruption=2)
    oracle = Oracle([[1]])
    with pytest.raises(ValueError, match="answers for 1 rows, but the batch has 2"):
        oracle.begin(context([1], [2]))
