"""New slots of a Jacobi window: guesses along a grid, forced tokens, window borders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mmspec
from mmspec.codes.grid import Grid
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Round
from mmspec.drafters.jacobi.initial import (
    AboveInitial,
    GridMap,
    Initialiser,
    LeftArgmaxInitial,
    LeftInitial,
    RandomInitial,
    StructuralInitial,
    WindowFrame,
)
from mmspec.drafters.jacobi.window import Jacobi
from mmspec.targets.tokens.context import Context, Request
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.covering import limited
from tests.drafters.tables import CPU, TableTarget, sample
from tests.toys import image_models

GRID = Grid(3, 3, codes=(4, 9), separator=1, header=(2,), footer=(3,))
#            offset  0   1  2  3   4  5  6  7   8  9 10 11  12  13
SIZE = 10


def frame(
    texts: list[list[int]], window: list[list[int]], known: list[int], grid: Grid | None = GRID
) -> WindowFrame:
    """Rows with these new tokens (after a prompt of one) and windows, partly known."""
    batch = len(texts)
    request = Request({}, Sampling(), KeyedNoise.from_seed(0, batch, CPU), 40)
    nothing: Any = None
    context = Context(
        request,
        tuple([0, *text] for text in texts),
        (1,) * batch,
        (0,) * batch,
        SIZE,
        nothing,
        request.noise,
        finished=(False,) * batch,
    )
    tokens = torch.tensor(window)
    new = torch.arange(tokens.shape[1]) >= torch.tensor(known)[:, None]
    distribution = Categorical(torch.zeros(batch, 1 + max(known), SIZE))
    return WindowFrame(
        context, tokens, new, distribution, None if grid is None else GridMap.of(grid, CPU)
    )


def fill_window(initial: Initialiser, given: WindowFrame) -> list[list[int]]:
    return torch.where(given.new, initial.fill(given), given.tokens).tolist()


def test_left_copies_within_a_row() -> None:
    """The window begins at offset 3: a code, the separator, and the first code of the next row."""
    given = frame([[2, 5, 6], [2, 7, 8]], [[0] * 6, [4, 1, 5, 0, 0, 0]], [0, 3])
    first, second = fill_window(LeftInitial(), given)
    assert first[0] == 6  # the committed token to the left
    assert first[3:5] == [first[2]] * 2  # copies of a random code in the first column
    assert first[2] in range(4, 9)
    assert second[:3] == [4, 1, 5]  # what is known stays
    assert second[3:5] == [5, 5]


def test_left_without_a_grid_repeats_the_last_token() -> None:
    given = frame([[2, 5], [8, 7]], [[0] * 3, [4, 0, 0]], [0, 1], grid=None)
    assert fill_window(LeftInitial(), given) == [[5, 5, 5], [4, 4, 4]]


def test_the_likeliest_token_of_the_slot_before() -> None:
    given = frame([[2, 5], [2, 5]], [[0] * 2, [4, 0]], [0, 1])
    scores = torch.zeros(2, 2, SIZE)
    scores[0, 0, 8] = scores[1, 1, 6] = 1.0  # after the last committed token; of the known slot
    scores[0, 1, 9] = 2.0  # row 0 has no known slot: this must not be read
    given = replace(given, distribution=Categorical(scores))
    assert fill_window(LeftArgmaxInitial(), given) == [[8, 8], [4, 6]]


def test_above_copies_the_row_before_and_what_was_copied() -> None:
    """Two rows of the window lie below the committed one: both end up with its codes."""
    given = frame([[2, 5, 6, 7, 1]], [[0] * 8], [0])
    (row,) = fill_window(StructuralInitial(AboveInitial()), given)
    assert row == [5, 6, 7, 1, 5, 6, 7, 1]
    given = frame([[2, 5, 6, 7, 1]], [[8, 0, 0, 0, 0, 0, 0, 0]], [1])
    assert fill_window(StructuralInitial(AboveInitial()), given)[0] == [8, 6, 7, 1, 8, 6, 7, 1]


def test_above_is_random_in_the_first_row() -> None:
    (row,) = fill_window(AboveInitial(), frame([[2]], [[0] * 3], [0]))
    assert set(row) <= set(range(4, 9))
    (row,) = fill_window(AboveInitial(), frame([[2]], [[0] * 3], [0], grid=None))
    assert len(row) == 3


@pytest.mark.parametrize("given", ["above", AboveInitial()], ids=["name", "object"])
def test_above_is_refused_where_no_grid_can_be(given: Any) -> None:
    """Before anything is decoded, and not by a drafter that retires in the first round."""
    with pytest.raises(
        ValueError, match=r"initial='above' copies .* LlamaForCausalLM generates none"
    ):
        mmspec.accelerate(toys.model("llama"), "sjd", initial=given)


def test_forced_tokens_are_drafted_as_such() -> None:
    whole = frame([[]], [[0] * 16], [0])
    (row,) = fill_window(StructuralInitial(RandomInitial()), whole)
    assert [row[offset] for offset in (0, 4, 8, 12, 13)] == [2, 1, 1, 1, 3]
    codes = [token for offset, token in enumerate(row) if GRID.cell_at(offset)]
    assert set(codes) <= set(range(4, 9))
    assert len(set(codes)) > 1
    (text,) = fill_window(
        StructuralInitial(RandomInitial()), frame([[]], [[0] * 200], [0], grid=None)
    )
    assert set(text) == set(range(SIZE))  # the whole vocabulary


def test_forced_tokens_are_never_rejected() -> None:
    grid = Grid(4, 1, codes=(1, 3), separator=0, header=(2,), footer=(1,))
    target = TableTarget(size=3, room=grid.length, scale=0.0, grid=grid)
    tokens, rounds = sample(target, Jacobi(4, grid=grid), Recursive(), 200)
    for row in tokens:
        assert all(row[offset] == grid.forced_token(offset) for offset in (0, 2, 4, 6, 8, 9))
    assert rejected_at(rounds)
    assert rejected_at(rounds) <= {1, 3, 5, 7}  # the codes
    _, blind = sample(target, Jacobi(4, initial=RandomInitial()), Recursive(), 200)
    assert rejected_at(blind) & {2, 4, 6, 8, 9}


def rejected_at(rounds: list[Round]) -> set[int]:
    """Offsets of the new tokens at which a draft was rejected."""
    places, offsets = set(), [0] * len(rounds[0].tokens)
    for turn in rounds:
        for row, tokens in enumerate(turn.tokens):
            if tokens and turn.accepted[row] < turn.drafted[row] and turn.takes_next[row]:
                places.add(offsets[row] + turn.accepted[row])
            offsets[row] += len(tokens)
    return places


@pytest.mark.parametrize("length", [1, 3, 30])
def test_windows_are_clamped_to_what_is_useful(length: int) -> None:
    target = TableTarget(size=2, room=6)
    _, rounds = sample(target, Jacobi(length), Recursive(), 50)
    left = target.room - 1
    for turn in rounds[1:]:
        assert max(turn.drafted) <= min(length, max(left - 1, 0))
        least = min(sum(len(t.tokens[row]) for t in rounds[: turn.index + 1]) for row in range(50))
        left = target.room - least


def test_a_length_that_changes_from_round_to_round() -> None:
    """The window is cut and widened again; the greedy text stays."""
    target = TableTarget(size=3, room=8)
    expected, _ = sample(target, Jacobi(0), Recursive(), 20, greedy=True)
    for length in ("heuristic", "auto"):
        found, _ = sample(target, Jacobi(length), Recursive(), 20, greedy=True)
        assert found == expected
    with pytest.raises(ValueError, match="length='x' is not a draft length"):
        Jacobi("x")


PICTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("emu3", "above", {"grid": (3, 3)}),
    ("emu3", "left-argmax", {"grid": (3, 3)}),
    ("llamagen-class", "left", {}),
]


@pytest.mark.parametrize(("family", "initial", "more"), limited(PICTURES, 2))
def test_pictures_are_those_of_plain_decoding(
    family: str, initial: str, more: dict[str, Any]
) -> None:
    """Under guidance, with rows that accept at their own pace; greedy, and with shared noise."""
    model, asked = image_models.PAINTERS[family](), image_models.request(family, batch=2) | more
    sampled = {**asked, "seed": 1, "temperature": 1.0}
    plain = mmspec.accelerate(model, "plain")
    fast = mmspec.accelerate(model, "mc-sjd", initial=initial, length=6)
    out = fast.generate_images(**asked)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences, plain.generate_images(**asked).sequences)
    coupled: dict[str, Any] = {"initial": initial, "length": 6, "verifier": "coupled"}
    fast = mmspec.accelerate(model, "mc-sjd-gumbel", **coupled)
    out = fast.generate_images(**sampled)
    assert out.stats.fallback is None
    assert torch.equal(out.sequences, plain.generate_images(**sampled).sequences)
