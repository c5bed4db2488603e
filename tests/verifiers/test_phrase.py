"""Phrases pass with the product of their ratios; without phrases nothing changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.codes.grid import Grid
from mmspec.codes.phrases import Phrases, Trie
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores
from mmspec.verifiers.phrase import PhraseJoint, count_accepted, joint
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.toys import image_models

CPU = torch.device("cpu")
ROWS = 20_000
P = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4], [0.3, 0.3, 0.4], [0.5, 0.3, 0.2]])
Q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])


def verifier(*phrases: tuple[int, ...]) -> PhraseJoint:
    return PhraseJoint(Trie.build(Phrases(dict.fromkeys(phrases, 1)), 3, CPU))


def make_draft(tokens: Tensor, p: Tensor = P, q: Tensor = Q) -> tuple[Draft, Scores, KeyedNoise]:
    rows = len(tokens)
    distribution = Categorical.from_weights(q.expand(rows, -1, -1))
    scores = Scores(
        Categorical.from_weights(p.expand(rows, -1, -1)), torch.arange(4).expand(rows, -1)
    )
    return Draft.chain(tokens, Kind.IID, distribution), scores, KeyedNoise.from_seed(0, rows, CPU)


def test_no_phrase_that_matches_is_the_rejection_verifier() -> None:
    tokens = torch.randint(0, 3, (500, 3), generator=torch.Generator().manual_seed(1))
    draft, scores, noise = make_draft(tokens)
    expected = Recursive().verify(draft, scores, noise)
    for library in ((), ((2, 2, 2, 2),)):
        found = verifier(*library).verify(draft, scores, noise)
        assert torch.equal(found.length, expected.length)
        assert torch.equal(found.path, expected.path)
        assert found.next is not None
        assert expected.next is not None
        assert torch.equal(found.next, expected.next)


def test_a_phrase_passes_with_the_product_of_its_ratios() -> None:
    """The phrase 0 0 has ratios 0.4 and 4: singly 0.4 passes, jointly 1. 20 000 rows: 0.0035."""
    draft, scores, noise = make_draft(torch.zeros(ROWS, 3, dtype=torch.int64))
    singly = Recursive().verify(draft, scores, noise).length
    jointly = verifier((0, 0)).verify(draft, scores, noise).length
    assert float((singly >= 2).float().mean()) == pytest.approx(0.4, abs=0.02)
    assert bool((jointly >= 2).all())
    whole = verifier((0, 0, 0)).verify(draft, scores, noise).length  # 0.4 * 4 * 0.6 = 0.96
    refused = 0.4 * 1 * 0.6  # and then one by one
    assert float((whole == 3).float().mean()) == pytest.approx(0.96 + 0.04 * refused, abs=0.01)


def test_equal_distributions_accept_every_phrase() -> None:
    draft, scores, noise = make_draft(torch.tensor([[0, 1, 2]]).expand(500, -1), q=P[:3])
    assert bool((verifier((0, 1, 2)).verify(draft, scores, noise).length == 3).all())


def test_tokens_that_were_never_scored_are_in_no_phrase() -> None:
    point = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]])
    draft, scores, noise = make_draft(torch.zeros(500, 3, dtype=torch.int64), q=point)
    expected = Recursive().verify(draft, scores, noise)
    found = verifier((0, 0), (0, 0, 0)).verify(draft, scores, noise)
    assert torch.equal(found.length, expected.length)


def test_the_joint_ratio_is_capped_at_its_end_only() -> None:
    ratio = torch.tensor([[0.25, 2.0, 8.0, 0.5]]).log()
    phrase = torch.tensor([[3, 2, 0, 0]])
    assert joint(ratio, phrase, 3)[0].tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0])
    assert joint(ratio, torch.tensor([[2, 0, 2, 0]]), 2)[0].tolist() == pytest.approx(
        [0.5, 1.0, 1.0, 1.0]
    )


@pytest.mark.parametrize(
    ("whole", "single", "phrase", "length"),
    [
        ("0000", "1101", "0000", 2),
        ("1000", "0010", "2000", 3),  # the phrase, then one token
        ("0000", "1111", "2000", 4),  # refused, but every token passes
        ("0000", "0111", "2000", 0),
        ("0100", "1000", "2200", 1),  # inside a refused phrase no other is tried
        ("0010", "1100", "2020", 4),  # behind it one is
        ("1010", "0000", "2020", 4),
    ],
)
def test_the_walk(whole: str, single: str, phrase: str, length: int) -> None:
    flags = [torch.tensor([[int(c) for c in line]]) for line in (whole, single, phrase)]
    assert count_accepted(flags[0].bool(), flags[1].bool(), flags[2]).tolist() == [length]


def test_no_phrase_goes_beyond_the_end_of_a_row() -> None:
    """Rows of one code hold no phrase, and are what they are without a library."""
    codes = range(image_models.FIRST, image_models.FIRST + image_models.CODES)
    library = Phrases({(one, other): 1 for one in codes for other in codes})
    model, asked = image_models.chameleon(), image_models.request("chameleon", 2)
    settings: dict[str, Any] = {"temperature": 3.0, "guidance": 1.0, "seed": 0}
    without, joint = (
        mmspec.accelerate(model, "sjd-pv", phrases=given) for given in (None, library)
    )
    same = []
    for grid in ((24, 1), (1, 24)):
        pair = [one.generate_images(**asked, **settings, grid=grid) for one in (without, joint)]
        same.append(torch.equal(pair[0].rounds, pair[1].rounds))
    assert same == [True, False]


def test_a_phrase_has_the_rest_of_its_row() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    trie = Trie.build(Phrases({(0, 0): 1, (0, 0, 0, 0): 1}), 1, CPU)
    at = replace(
        PhraseJoint(trie), grid=Grid(2, 4, (0, 1), separator=3, header=(3,)), offsets=(1, 3)
    )
    remaining = at.remaining_cells(tokens)
    assert remaining is not None
    assert remaining.tolist() == [[4, 3, 2, 1, 0, 4], [2, 1, 0, 4, 3, 2]]
    found = trie.matches(tokens, tokens == 0, remaining)
    assert found.tolist() == [[4, 2, 2, 0, 0, 0], [2, 0, 0, 2, 2, 0]]


def test_the_recipe_takes_a_library_or_its_file(tmp_path: Path) -> None:
    model, request = toys.model("llama"), toys.inputs("llama")
    settings = {"max_new_tokens": 8, "temperature": 1.0, "seed": 2}
    sjd = mmspec.accelerate(model, "sjd").generate(**request, **settings)
    fast = mmspec.accelerate(model, "sjd-pv")
    assert torch.equal(fast.generate(**request, **settings).sequences, sjd.sequences)
    library = Phrases.build([row.tolist() for row in sjd.sequences], min_count=1)
    library.save(tmp_path / "phrases.safetensors")
    for given in (library, tmp_path / "phrases.safetensors"):
        fast = mmspec.accelerate(model, "sjd-pv", phrases=given)
        out = fast.generate(**request, **settings)
        assert out.stats.fallback is None
        assert not out.stats.exact
    with pytest.raises(TypeError, match="phrases is a int"):
        mmspec.accelerate(model, "sjd-pv", phrases=3)
