"""Rows decoded in parallel: plain decoding where nothing is missing, else drafts with gaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.codes.grid import Grid
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Kind, Verifier
from mmspec.drafters.plain import NoDraft
from mmspec.drafters.rows.row_chain import DraftedCode
from mmspec.drafters.rows.wavefront import Wavefront, build_chain
from mmspec.targets.readers.code_backbone import CodeBackbone
from mmspec.verifiers.block import Block
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.distances import total_variation
from mmspec.verifiers.recursive import Recursive
from mmspec.verifiers.unchecked import Unchecked
from tests import toys
from tests.covering import limited
from tests.drafters.tables import CPU, TableTarget, sample, z_score
from tests.toys import image_models

GRID = Grid(2, 3, (0, 2))
TARGET = TableTarget(size=2, room=6, scale=2.0, seed=4)
RULED = Grid(2, 2, (0, 2), separator=2, header=(1,), footer=(0,))
ROWS = 3_000


def drafted_codes(grid: Grid, **rows: str) -> dict[int, DraftedCode]:
    """Codes by row, as r1="ab"."""
    return {
        grid.offset_of(int(name[1:]), column): DraftedCode(ord(letter), scores=torch.zeros(1))
        for name, codes in rows.items()
        for column, letter in enumerate(codes)
    }


def format_nodes(chain: Any) -> str:
    return " ".join(f"{place}{chr(token)}" for place, token in chain.nodes)


def test_the_block_is_in_raster_order_with_gaps() -> None:
    grid = Grid(3, 6, (0, 300))
    chain = build_chain(
        grid, 2, 5, drafted_codes(grid, r1="123"), ord("e")
    )  # the example of the module
    assert format_nodes(chain) == "11 22 33 63"
    assert (chain.num_contiguous, chain.fronts) == (0, ((0, 5), (3, 9), (4, 12)))
    begun = build_chain(grid, 2, 5, drafted_codes(grid, r1="1234", r2="56"), ord("e"))
    assert format_nodes(begun) == "11 22 33 44 75 86"
    assert begun.fronts == ((0, 5), (4, 10), (6, 14))
    closed = build_chain(grid, 2, 6, drafted_codes(grid, r1="12345", r2="67"), ord("f"))
    assert (format_nodes(closed), closed.num_contiguous) == ("01 12 23 34 45 66 77", 5)
    assert closed.fronts == ((5, 11), (7, 14))
    assert build_chain(grid, 3, 2, {}, ord("b")).fronts == ((0, 2),)  # too early for another row
    assert build_chain(grid, 9, 5, {}, ord("e")).fronts == ((0, 5),)
    assert build_chain(grid, 2, 18, {}, ord("z")).nodes == ()


def test_forced_tokens_stand_where_they_belong() -> None:
    grid = Grid(2, 2, (65, 300), separator=ord("|"), header=(ord("("),), footer=(ord(")"),))
    start = build_chain(grid, 1, 0, {}, 0)
    assert (format_nodes(start), start.num_contiguous, start.fronts) == ("0(", 1, ((1, 1),))
    second = build_chain(
        grid, 1, 2, {}, ord("a")
    )  # the separator is known, nothing stands in for it
    assert (format_nodes(second), second.num_contiguous, second.fronts) == (
        "1|",
        0,
        ((0, 2), (1, 4)),
    )
    last = build_chain(grid, 1, 3, drafted_codes(grid, r1="cd"), ord("b"))
    assert (format_nodes(last), last.num_contiguous, last.fronts) == ("0| 1c 2d 3| 4)", 5, ())


PICTURES: list[tuple[str, dict[str, Any]]] = [
    ("llamagen-class", {}),
    ("janus", {}),
    ("emu3", {"grid": (3, 4)}),
    ("chameleon", {}),
]


@pytest.mark.parametrize(
    ("family", "given"), limited(PICTURES, 2), ids=[name for name, _ in PICTURES]
)
def test_a_window_of_a_row_is_plain_decoding(family: str, given: dict[str, Any]) -> None:
    """Token for token with the same seed, under guidance and in a batch."""
    model, request = image_models.PAINTERS[family](), image_models.request(family, batch=2)
    how = {**request, **given, "guidance": 2.0, "temperature": 1.0, "seed": 5}
    if family == "chameleon":
        how |= {"guidance": 1}
    plain = mmspec.accelerate(model, "plain").generate_images(**how)
    wide = mmspec.accelerate(model, "zipar", window=9).generate_images(**how)
    assert torch.equal(wide.sequences, plain.sequences)
    assert wide.stats.over_accepted_mass == 0
    narrow = mmspec.accelerate(model, "zipar", window=1).generate_images(**how)
    assert narrow.stats.fallback is None
    assert not torch.equal(narrow.sequences, plain.sequences)
    assert narrow.stats.over_accepted_mass is not None
    assert 0.01 < narrow.stats.over_accepted_mass < 1
    for verifier in ("coupled", "rejection"):
        exact = mmspec.accelerate(model, "zipar", window=1, verifier=verifier)
        assert exact.recipe.exact
        out = exact.generate_images(**how)
        assert out.stats.fallback is None
        assert verifier == "rejection" or torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("window", limited([1, 2, 3, 4, 7], 3))
def test_how_many_forwards_it_takes(window: int) -> None:
    """W + (H - 1) w with the prefill; behind the last code one more reads what is forced."""
    square, side = image_models.llamagen_class(), image_models.SIDE
    fast = mmspec.accelerate(square, "zipar", window=window)
    out = fast.generate_images(**image_models.request("llamagen-class", batch=2), seed=1)
    assert 1 + out.stats.target_calls == side + (side - 1) * min(window, side)
    ruled, request = image_models.emu3(), image_models.request("emu3")
    fast = mmspec.accelerate(ruled, "zipar", window=window)
    out = fast.generate_images(**request, grid=(3, 5), guidance=1, seed=1)
    assert out.stats.target_calls == 5 + 2 * min(window, 5)


@torch.no_grad()
def reference(model: Any, condition: Tensor, window: int, seed: int) -> list[int]:
    """The wavefront with a dictionary and a forward from scratch for every code."""
    side, start = image_models.SIDE, 1
    noise = KeyedNoise.from_seed(seed, 1, CPU)
    codes: dict[tuple[int, int], int] = {}
    while len(codes) < side * side:
        count = [sum((row, column) in codes for column in range(side)) for row in range(side)]
        drawn = {}
        for row in range(side):
            if count[row] == side or (row and count[row - 1] < min(window, side)):
                continue
            here = row * side + count[row]
            seen = {r * side + c: code for (r, c), code in codes.items() if r * side + c < here}
            if here and here - 1 not in seen:
                seen[here - 1] = codes[row - 1, count[row - 1] - 1]
            order = sorted(seen)
            embeds = model.model.condition(condition)
            if order:
                words = torch.tensor([[seen[place] for place in order]])
                embeds = torch.cat((embeds, model.model.embed_tokens(words)), 1)
            position = torch.tensor([[0, *(start + place for place in order)]])
            mask = torch.ones_like(position)  # without one, gaps would begin another sequence
            out = model.model(inputs_embeds=embeds, attention_mask=mask, position_ids=position)
            distribution = Categorical(model.lm_head(out.last_hidden_state)[:, -1:])
            drawn[row, count[row]] = int(
                distribution.sample(noise.shared_keys(torch.tensor([[start + here]])))
            )
        codes |= drawn
    return [codes[row, column] for row in range(side) for column in range(side)]


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_codes_are_those_of_a_front_without_a_cache(window: int) -> None:
    model = image_models.llamagen_class()
    how = {"class_ids": torch.tensor([3]), "guidance": 1, "temperature": 1.0, "seed": 8}
    out = mmspec.accelerate(model, "zipar", window=window).generate_images(**how)
    assert out.sequences[0].tolist() == reference(model, torch.tensor([[3]]), window, 8)


@pytest.mark.parametrize("window", limited([1, 2], 1))
def test_verified_the_front_is_exact(window: int) -> None:
    """Chi-square on all sequences; z > 3 has probability 0.4 % under the right distribution."""
    assert abs(z_score(TARGET, Wavefront(window, GRID, Kind.IID), Recursive(), ROWS)) < 3
    assert z_score(TARGET, Wavefront(window, GRID), Unchecked(), ROWS // 3) > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("grid", [GRID, Grid(3, 2, (0, 2))], ids=["2x3", "3x2"])
def test_verified_the_front_is_exact_on_many_rows(grid: Grid) -> None:
    assert abs(z_score(TARGET, Wavefront(1, grid, Kind.IID), Recursive(), 40_000, seed=1)) < 3


def test_verified_the_front_is_exact_around_forced_tokens() -> None:
    target = TableTarget(size=3, room=RULED.length, scale=1.5, seed=2, grid=RULED)
    distribution = target.joint()
    assert int((distribution > 0).sum()) == 3**RULED.cells
    tokens, rounds = sample(target, Wavefront(1, RULED), Coupled(), 500, seed=2)
    assert tokens == sample(target, NoDraft(), Coupled(), 500, seed=2)[0]
    assert len(rounds) < target.room
    greedy, _ = sample(target, Wavefront(1, RULED, Kind.IID), Recursive(), 3, greedy=True)
    assert greedy == sample(target, NoDraft(), Recursive(), 3, greedy=True)[0]


@pytest.mark.exhaustive
def test_the_distance_is_measured() -> None:
    """One code of a 2 x 2 grid lacks one token: TV in closed form, five standard deviations."""
    grid, target = Grid(2, 2, (0, 3)), TableTarget(size=3, room=4, scale=1.5, seed=1)
    _, rounds = sample(target, Wavefront(1, grid), Unchecked(), 20_000)
    first = target.logits[0].exp()
    expected = 0.0
    for a in range(3):
        placeholder = target.logits[target.row(torch.tensor(2), torch.tensor(a * 3 + a))].exp()
        for b in range(3):
            after = target.logits[target.row(torch.tensor(1), torch.tensor(a))].exp()[b]
            full = target.logits[target.row(torch.tensor(2), torch.tensor(a * 3 + b))].exp()
            expected += float(first[a] * after * total_variation(full, placeholder))
    found = torch.tensor([kept.excess for kept in rounds if kept.excess is not None]).sum(0)
    assert float(found.mean()) == pytest.approx(expected, abs=5 * float(found.std()) / 20_000**0.5)


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="window=0 starts a row"):
        Wavefront(0)
    model = image_models.llamagen_class()
    with pytest.raises(ValueError, match="drop length= and tree="):
        mmspec.accelerate(model, "zipar", length=3)
    with pytest.raises(ValueError, match="decides about a token by looking at later ones"):
        mmspec.accelerate(model, "zipar", verifier=Block())


def test_without_a_grid_it_is_plain_decoding() -> None:
    request = toys.inputs("llama", batch=2)
    settings = {"max_new_tokens": 6, "temperature": 1.0, "seed": 1}
    fast = mmspec.accelerate(toys.model("llama"), "zipar")
    plain = mmspec.decode_plain(toys.model("llama"), **request, **settings)
    assert torch.equal(fast.generate(**request, **settings).sequences, plain.sequences)


VERIFIERS: list[Verifier] = [Unchecked(), Recursive()]


@pytest.mark.parametrize("verifier", VERIFIERS, ids=repr)
def test_rows_of_a_batch_do_not_disturb_each_other(verifier: Verifier) -> None:
    model, request = image_models.janus(), image_models.request("janus", batch=2)
    fast = mmspec.accelerate(model, "zipar", window=1, verifier=verifier)
    assert isinstance(fast.session.bound.backbone.reader, CodeBackbone)
    how = {"guidance": 2.0, "temperature": 1.0, "seed": 4}
    both = fast.generate_images(**request, **how).sequences
    for row in range(2):
        alone = {name: value[row : row + 1] for name, value in request.items()}
        single = fast.generate_images(**alone, **how, row_ids=[row]).sequences
        assert isinstance(verifier, Recursive) or torch.equal(single[0], both[row])
