"""Fillers may be shifted, visually relevant words may not; shift 0 is plain decoding."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores, Verdict
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.visual_relevance import VisualRelevance
from tests import toys
from tests.covering import covering
from tests.partners import partner

CPU = torch.device("cpu")
IMAGE = 9
TARGET = [0, 1, 2, 3, 4]  # what the target says after the context and after each of four nodes
SIGHT, SOUND = [1.0, 0.0], [0.0, 1.0]  # states that look at the picture, and that do not


def verdict(drafted: list[int], states: list[list[float]], **options: Any) -> Verdict:
    """The verdict on one row whose prompt is an image of two tokens, a word, and left padding."""
    distribution = torch.full((1, 5, 6), -9.0).scatter(2, torch.tensor(TARGET)[None, :, None], 9.0)
    scores = Scores(
        Categorical(distribution, hard=True),
        torch.arange(5)[None],
        {"hidden": torch.tensor([[[0.0, 0.0], *states]])},
    )
    context: Any = SimpleNamespace(
        batch=1,
        shared={"hidden": torch.tensor([[SOUND, SIGHT, SIGHT, SOUND]])},
        request=SimpleNamespace(inputs={"input_ids": torch.tensor([[0, IMAGE, IMAGE, 5]])}),
    )
    rule = VisualRelevance(frozenset({IMAGE}), **{"nearest": 2, **options}).bind_context(context)
    draft = Draft.chain(torch.tensor([drafted]), Kind.DET)
    return rule.verify(draft, scores, KeyedNoise.from_seed(0, 1, CPU))


@pytest.mark.parametrize(
    ("drafted", "length"),
    [
        ([0, 1, 2, 3], 4),
        ([1, 1, 2, 3], 4),  # said one place later
        ([0, 0, 2, 3], 4),  # said one place before
        ([2, 1, 2, 3], 0),  # two places away
        ([0, 1, 2, 4], 4),  # what follows the last node counts
        ([5, 1, 2, 3], 0),
    ],
)
def test_a_filler_may_be_shifted_by_one(drafted: list[int], length: int) -> None:
    found = verdict(drafted, [SOUND] * 4)
    assert int(found.length) == length
    assert found.next is not None
    assert int(found.next) == TARGET[length]
    assert found.excess is not None
    assert float(found.excess) == sum(
        a != b for a, b in zip(drafted[:length], TARGET, strict=False)
    )


def test_a_visually_relevant_word_may_not() -> None:
    assert int(verdict([1, 1, 2, 3], [SIGHT, SOUND, SOUND, SOUND]).length) == 0
    assert int(verdict([0, 2, 2, 3], [SOUND, SIGHT, SOUND, SOUND]).length) == 1
    assert int(verdict([0, 1, 2, 3], [SIGHT] * 4).length) == 4


def test_relevance_is_the_mean_of_the_nearest_cosines() -> None:
    tilted = [[0.6, 0.8], *[SOUND] * 3]  # cosine 0.6 with either visual token
    assert int(verdict([1, 1, 2, 3], tilted, relevance=0.59).length) == 0
    assert int(verdict([1, 1, 2, 3], tilted, relevance=0.61).length) == 4
    assert int(verdict([1, 1, 2, 3], tilted, relevance=0.61, nearest=50).length) == 4


def test_more_slack_keeps_more() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        drafted = torch.randint(0, 6, (4,), generator=generator).tolist()
        states = torch.randn(4, 2, generator=generator).tolist()
        by_shift = [int(verdict(drafted, states, shift=n).length) for n in range(5)]
        by_cosine = [
            int(verdict(drafted, states, relevance=n, shift=2).length)
            for n in (-1, -0.5, 0, 0.5, 1)
        ]
        assert by_shift == sorted(by_shift)
        assert by_cosine == sorted(by_cosine)
        assert by_shift[0] == by_cosine[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"nearest": 0}, "nearest=0"), ({"shift": -1}, "shift=-1"), ({"relevance": 1.5}, "a cosine")],
)
def test_numbers_that_mean_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        VisualRelevance(frozenset({IMAGE}), **options)


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.mark.parametrize(
    ("settings", "exact"),
    covering(
        [{}, {"temperature": 1.0, "seed": 3}], [{"shift": 0}, {"relevance": -1.0}], strength=1
    ),
    ids=str,
)
def test_without_slack_it_is_plain_decoding(
    family: str, exact: dict[str, Any], settings: dict[str, Any]
) -> None:
    model, request = toys.model(family), toys.inputs(family, batch=3, ragged=True)
    fast = mmspec.accelerate(model, "lvspec", drafter=partner("lvspec", family), **exact)
    out = fast.generate(**request, max_new_tokens=12, **settings)
    plain = mmspec.decode_plain(model, **request, max_new_tokens=12, **settings)
    assert out.stats.exact
    assert torch.equal(out.sequences, plain.sequences)


def test_with_all_of_it_more_is_kept_and_counted(family: str) -> None:
    model, request = toys.model(family, layers=3), toys.inputs(family, batch=2, ragged=True)
    drafter = partner("lvspec", family, 3)
    loose = mmspec.accelerate(model, "lvspec", drafter=drafter, relevance=1.0, shift=6)
    strict = mmspec.accelerate(model, "lvspec", drafter=drafter, shift=0)
    asked = {**request, "max_new_tokens": 24, "temperature": 1.0, "seed": 1}
    found, wanted = (way.generate(**asked) for way in (loose, strict))
    assert found.stats.mean_acceptance_length > wanted.stats.mean_acceptance_length
    assert not torch.equal(found.sequences, wanted.sequences)
    assert not loose.recipe.exact


def test_text_alone_is_checked_strictly() -> None:
    model, request = toys.model("llava"), toys.inputs("llava", batch=1)
    ids = request["input_ids"]
    text = ids[ids != model.config.image_token_index][None]
    fast = mmspec.accelerate(
        model, "lvspec", drafter=partner("lvspec", "llava"), relevance=1.0, shift=6
    )
    out = fast.generate(input_ids=text, max_new_tokens=16, temperature=1.0, seed=2)
    plain = mmspec.decode_plain(model, input_ids=text, max_new_tokens=16, temperature=1.0, seed=2)
    assert torch.equal(out.sequences, plain.sequences)


def test_its_limit_is_the_coupled_verifier() -> None:
    rule = VisualRelevance(frozenset({IMAGE}), shift=0)
    assert rule.lossless
    assert rule.couples
    assert rule.kinds == replace(rule, shift=2).kinds
    assert set(rule.kinds) == set(Coupled.kinds)
