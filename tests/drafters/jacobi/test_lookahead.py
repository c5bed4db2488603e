"""Lookahead: the window is a Jacobi iteration, its n-grams are right, and it never decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import mmspec
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Scores, Verdict, Verifier
from mmspec.drafters.jacobi.lookahead import Lookahead, LookaheadState, RowWindow, build_tree
from mmspec.verifiers.coupled import Coupled, target_tokens
from mmspec.verifiers.walk import find_deepest_path
from tests import toys
from tests.drafters.driving import context, count_accepted, drive, greedy, inputs, tiny

SMALL = Lookahead(window=4, ngram=4, guesses=3)


def test_the_tree_is_that_of_the_drawing() -> None:
    tree = build_tree(columns=3, levels=3, guesses=2, depth=3)
    #                    a1 a2  b0 c0  b1 c1  b2 c2  n-grams
    assert tree.parents == (-1, 0, -1, 2, 0, 4, 1, 6, -1, 8, 9, -1, 11, 12)
    assert build_tree(0, 3, 0, 3).nodes == 0


def test_the_window_moves_with_the_text() -> None:
    """Tokens are numbered by their position, so that every level stays a run of numbers."""
    row, sizes = RowWindow(), replace(SMALL, read_prompt=False)
    row.start([0], sizes, 48)
    row.levels = [[1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    row.move(0, [3, 4, 5, 6], 2, sizes)
    assert row.levels == [[3, 4, 0], [3, 4, 5, 0], [4, 5, 6, 0]]
    assert row.pool == {at: {(at + 1, at + 2, at + 3): None} for at in range(4)}


def test_the_oldest_ngrams_give_way_and_pictures_are_left_out() -> None:
    row, sizes = RowWindow(), replace(SMALL, ignore=frozenset({9}))
    row.start([5, 9, 5, 1, 2, 3, 5], sizes, 48)
    assert row.pool == {5: {(1, 2, 3): None}, 1: {(2, 3, 5): None}}
    other = RowWindow()
    other.start([-1, 50, 2], sizes, 48)  # classes, and the first code of an image
    assert {token for level in other.levels for token in level} == {2}
    assert 9 not in [token for level in row.levels for token in level]
    for last in (4, 6, 3, 7):
        row.store(5, (1, 2, last), sizes)
    assert [ngram[-1] for ngram in row.pool[5]] == [6, 3, 7]


def test_ngrams_of_the_last_token_are_drafted_and_nothing_else_can_be_accepted() -> None:
    now = context([1, 2, 3, 4, 1], [6, 7, 8, 9, 5])
    state = SMALL.begin(now)
    draft = SMALL.propose(now, state)
    window = 3 + 4 * 2
    assert draft.tokens[0, window:].tolist() == [2, 3, 4]
    assert draft.mask.tolist() == [[False] * window + [True] * 3, [False] * (window + 3)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_window_on_the_text_itself_is_a_fixed_point(temperature: float) -> None:
    """Jacobi iteration: once right, a window stays right, and all its n-grams are of the text."""
    model, prompt, room = tiny(), inputs(), 40
    how = {"do_sample": True, "temperature": temperature} if temperature else {}
    drafter = Lookahead(window=4, ngram=4, guesses=1, read_prompt=False)
    plain, _ = drive(model, mmspec.recipes.get("plain").architecture(None), prompt, room, **how)  # type: ignore[arg-type]
    text = prompt["input_ids"][0].tolist() + plain[0]

    class Seeded(Lookahead):
        def begin(self, now: object) -> LookaheadState:
            at = len(prompt["input_ids"][0])
            row = RowWindow(words=[0])
            row.levels = [text[at + 1 : at + 4], text[at + 1 : at + 5], text[at + 2 : at + 6]]
            return LookaheadState([row])

    seeded = Seeded(window=4, ngram=4, guesses=1, read_prompt=False)
    found, rounds = drive(model, seeded, prompt, room, **how)
    assert found == plain
    assert drive(model, drafter, prompt, room, **how)[0] == plain
    assert count_accepted(rounds) > 3
    assert rounds[2].accepted[0] == 3  # found beside the first round, verified in the next


class NoPrefix(Verifier):
    """The wrong rule: a token counts that equals the target's after a wrong prefix."""

    lossless: ClassVar[bool] = True
    kinds = Coupled.kinds

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        if not draft.nodes:
            return Coupled().verify(draft, scores, noise)
        own = target_tokens(draft, scores, noise)
        right = own.gather(1, draft.parents + 1) == draft.tokens
        path, length, row = find_deepest_path(draft, right & draft.mask)
        return Verdict(path, length, own.gather(1, row[:, None])[:, 0])


def test_a_rule_that_ignores_the_prefix_fails_where_lookahead_does_not() -> None:
    model, request = toys.model("llama"), toys.inputs("llama", batch=3, ragged=True)
    expected = model.generate(**request, max_new_tokens=24, do_sample=False)
    made: dict[str, Any] = {"window": 4, "ngram": 4, "guesses": 6}
    for verifier, same in ((Coupled(), True), (NoPrefix(), False)):
        fast = mmspec.accelerate(model, "lookahead", verifier=verifier, **made)
        out = fast.generate(**request, max_new_tokens=24, do_sample=False)
        assert out.stats.fallback is None
        assert torch.equal(out.sequences, expected) == same


def test_what_it_cannot_do_is_refused() -> None:
    model = toys.model("llama")
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"window": 0}, "window=0 must be a whole number of at least 1"),
        ({"ngram": 2}, "ngram=2 must be a whole number of at least 3"),
        ({"guesses": 1.5}, r"guesses=1.5 must be a whole number"),
        ({"length": 4}, "a shape of its own; give window="),
    )
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            mmspec.accelerate(model, "lookahead", **options)
    with pytest.raises(ValueError, match=r"recurrent state.*beside the text; use recipe='suffix'"):
        mmspec.accelerate(toys.model("lfm2"), "lookahead")


def test_rows_join_and_leave() -> None:
    model, prompt = tiny(), inputs((0, 3))
    assert drive(model, SMALL, prompt, 20)[0] == greedy(model, prompt, 20)
    one, two = (SMALL.begin(context([1, 2])) for _ in range(2))
    first, second = one.rows[0], two.rows[0]
    one.join(two)
    one.drop(0)
    assert one.rows == [second]
    assert one.rows[0] is second is not first
