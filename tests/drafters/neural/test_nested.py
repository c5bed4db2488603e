"""Cascades: a level's tokens have its own distribution, and the target's verdict needs no other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import mmspec
from mmspec.bench.frequency import chi_square, p_value
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import Noise
from mmspec.draft import Draft, Kind, Scores, Verdict, Verifier
from mmspec.drafters.draft_model import DraftModel, DraftNodes
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.cascades import plan_cascade
from mmspec.drafters.neural.nested import Nested, Search
from mmspec.drafters.neural.small_model import Autoregressive
from mmspec.drafters.neural.stem import Stem, count_equal
from mmspec.drafters.shapes import Chain
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.enumeration import ancestral_joint, enumerate_joint
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.drafters.driving import context
from tests.partners import noisy
from tests.verifiers.random_distributions import by_prefix

SIZE = 3


@dataclass(frozen=True)
class Markov(DraftModel):
    """The distribution of a token depends on the one before it."""

    seed: int
    sees: ClassVar[str] = "nothing"

    @property
    def table(self) -> Tensor:  # (V, V)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(SIZE, SIZE, generator=generator).double().log_softmax(-1)

    def predict_first(self, context: Context, state: Any) -> Categorical:
        return Categorical(self.table[torch.tensor([[row[-1]] for row in context.history])])

    def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
        return Categorical(self.table[nodes.tokens])


MIDDLE, SMALL = Markov(0), Markov(1)
CASCADES = (
    Nested((MIDDLE, SMALL), (3, 2)),
    Nested((MIDDLE, Markov(2), SMALL), (3, 2, 2)),
    Nested((MIDDLE,), (3, 2), Search(longest=1)),
)


@pytest.mark.parametrize("cascade", CASCADES, ids=["two", "three", "search"])
def test_drafted_tokens_have_the_middle_model_s_distribution(cascade: Nested) -> None:
    now = context(*[[0, 1, 0, 1, 2, 0]] * 1200, vocabulary=SIZE)
    drafter = cascade.with_kind(Kind.IID)
    draft = drafter.propose(now, drafter.begin(now))
    assert draft.tokens.shape == (1200, 3)
    one, two, three = draft.tokens.unbind(1)
    counts = (one * 9 + two * 3 + three).bincount(minlength=27)
    q = MIDDLE.table.exp()
    expected = (q[0][:, None, None] * q[:, :, None] * q[None]).flatten() * 1200
    assert p_value(chi_square(counts, expected)[0], 26) > 1e-6
    recorded = draft.distribution
    assert isinstance(recorded, Categorical)
    before = torch.cat((torch.zeros_like(one)[:, None], draft.tokens[:, :2]), 1)
    assert_close(recorded.probs, q[before])


@pytest.mark.parametrize("cascade", CASCADES, ids=["two", "three", "search"])
def test_with_shared_noise_a_cascade_drafts_what_its_first_model_would(cascade: Nested) -> None:
    now = context(*([0, 1, row % 3, 1, 2, row % 2] for row in range(40)), vocabulary=SIZE)
    alone = Autoregressive(MIDDLE, Chain(Fixed(3)), Kind.RACE)
    expected = alone.propose(now, alone.begin(now)).tokens
    drafter = cascade.with_kind(Kind.RACE)
    assert torch.equal(drafter.propose(now, drafter.begin(now)).tokens, expected)


def test_the_search_drafts_the_last_tokens_alone() -> None:
    text = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    drafter = Nested((MIDDLE,), (1, 2), Search(longest=3), tail=4).with_kind(Kind.IID)
    now = context(text, vocabulary=SIZE)
    draft = drafter.propose(now, drafter.begin(now))
    first = int(draft.tokens[0, 0])
    if first == 1:
        assert draft.tokens[0].tolist() == [1, 2, 0, 1, 2]
    recorded = draft.distribution
    assert isinstance(recorded, Categorical)
    points = recorded.probs[0, 1:].gather(-1, draft.tokens[0, 1:, None])
    assert points.tolist() == [[1.0]] * (draft.nodes - 1)


@dataclass(frozen=True)
class WithSmallOnes(Verifier):
    """The wrong variant: the small model's probabilities in place of the middle one's."""

    q: Any
    lossless: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.IID,)

    def verify(self, draft: Draft, scores: Scores, noise: Noise) -> Verdict:
        assert draft.distribution is not None
        roots = self.q(()).expand(draft.batch, -1)
        after = torch.stack([self.q((token,)) for token in range(roots.shape[-1])])
        own = torch.stack((roots, after[draft.tokens[:, 0]]), 1)
        return Recursive().verify(
            replace(draft, distribution=Categorical.from_weights(own)), scores, noise
        )


def test_nested_verification_is_lossless_with_the_middle_model_s_probabilities() -> None:
    p, middle, small = by_prefix(1), by_prefix(2), by_prefix(3)
    expected = ancestral_joint(p, 3)
    tree = mmspec.trees.Tree.chain(2)
    found = enumerate_joint(p, middle, Recursive(), tree, Kind.IID)
    assert_close(found, expected, atol=1e-12, rtol=0)
    wrong = enumerate_joint(p, middle, WithSmallOnes(small), tree, Kind.IID)
    assert float((wrong - expected).abs().sum()) > 0.05


def test_what_is_taken_back_is_no_longer_attended_to() -> None:
    now = context([0], [1], vocabulary=SIZE)
    seen: list[DraftNodes] = []

    class Recorded(Markov):
        def predict(self, context: Context, state: Any, nodes: DraftNodes) -> Categorical:
            seen.append(nodes)
            return super().predict(context, state, nodes)

    stem = Stem(Recorded(0), now, None)
    stem.read([[0, 1, 2], [1]])
    stem.read([[0, 2], [1, 1]])
    assert stem.columns == [[0, 3], [0, 3]]
    assert seen[1].layout.visible.tolist() == [[[True, False, False, True]]] * 2
    assert seen[1].layout.depths.tolist() == [[1], [1]]
    found = stem.after([1, 2], 2).probs
    table = MIDDLE.table.exp()
    assert_close(found[0], table[[0, 2]])
    assert_close(found[1], table[[1, 1]])  # the end is repeated
    assert stem.columns_of([[0, 2, 1], [1, 2]], (3, 2)) == ((0, 3), (0,))
    assert count_equal([1, 2], [1, 2, 3]) == 2


NAMED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cs-drafting", {}),
    ("triforce", {}),
    ("polybasic", {"models": 1, "lengths": (2,)}),
)


@pytest.mark.parametrize(("name", "options"), NAMED, ids=str)
def test_a_cascade_of_models_is_exact(name: str, options: dict[str, Any]) -> None:
    model = toys.model("llava", layers=2)
    if "models" in options:
        options = {**options, "models": [noisy("llava", scale=0.3)]}
    fast = mmspec.accelerate(model, name, drafter=noisy("llava", scale=0.08), **options)
    request = toys.inputs("llava", batch=3, ragged=True)
    for settings in ({"do_sample": False}, {"temperature": 1.0, "seed": 4}):
        out = fast.generate(**request, max_new_tokens=16, **settings)
        plain = mmspec.decode_plain(model, **request, max_new_tokens=16, **settings)
        assert out.stats.fallback is None
        assert out.stats.num_accepted_draft_tokens > 0
        assert torch.equal(out.sequences, plain.sequences)


def test_the_planner_uses_a_middle_model_where_it_pays() -> None:
    agreement = {(0, 1): 0.9, (0, 2): 0.4, (1, 2): 0.8}
    best = plan_cascade([1.0, 0.2, 0.01], agreement)
    assert best.levels == (0, 1, 2)
    alone = plan_cascade([1.0], {})
    assert (alone.levels, alone.lengths, alone.seconds) == ((0,), (), 1.0)
    pair = plan_cascade([1.0, 0.2], agreement, longest=4)  # identities of methods/foundations.md
    assert pair.lengths == (4,)
    assert pair.seconds == pytest.approx((1 + 4 * 0.2) / ((1 - 0.9**5) / 0.1))
    assert plan_cascade([1.0, 0.2, 0.19], agreement).levels == (0, 1)
    assert plan_cascade([1.0, 2.0], {(0, 1): 0.5}).levels == (0,)
    with pytest.raises(ValueError, match="must be positive times"):
        plan_cascade([], {})


def test_what_makes_no_cascade_is_refused() -> None:
    model, drafter = toys.model("llama"), toys.model("llama")
    for name, options, message in (
        ("cs-drafting", {"tree": [2, 1]}, "a cascade drafts chains"),
        ("cs-drafting", {"inner": 0}, "length of a level=0 must be a whole number of at least 1"),
        ("polybasic", {"models": "folder"}, "models='folder' is not a list"),
        ("polybasic", {"lengths": (1, 2)}, "levels=2 must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            mmspec.accelerate(model, name, drafter=drafter, **options)
    hybrid = toys.model("lfm2")
    with pytest.raises(ValueError, match="take tokens back within a draft"):
        mmspec.accelerate(hybrid, "cs-drafting", drafter=toys.model("lfm2"))
    with pytest.raises(ValueError, match="2 lengths are given for 1 levels"):
        Nested((MIDDLE,), (1, 2))
