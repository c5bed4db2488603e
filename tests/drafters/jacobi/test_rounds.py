"""One round of a Jacobi window on given distributions and random numbers, computed by hand.

slot        0            1            2            3
token       0            0            1            (new)
p/q         2            1/4          1/2
uniform     0.9          0.3          0.4
verdict     accepted     rejected     carried      drawn from p
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.noise import Lane, Noise, quantile
from mmspec.draft import Draft, Kind, Round, Scores, Verdict
from mmspec.drafters.jacobi.suffix import (
    KEEP,
    REDRAW,
    CoupleGumbel,
    CoupleMax,
    OneHotReuse,
    Resample,
    SuffixPolicy,
    ThresholdReuse,
)
from mmspec.drafters.jacobi.window import Jacobi, JacobiWindow
from mmspec.targets.tokens.context import Context
from mmspec.verifiers.recursive import Recursive
from tests.drafters.tables import CPU

FIRST = 7  # position of slot 0
P = torch.tensor(
    [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.3, 0.3, 0.4]], dtype=torch.float64
)
Q = torch.tensor([[0.25, 0.5, 0.25], [0.4, 0.4, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64)
X = torch.tensor([0, 0, 1])
POINT = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)  # on the token of slot 2


@dataclass(frozen=True)
class Given:
    """Random numbers by slot; tensors are (slots,), Gumbel noise is (slots, V)."""

    accept: Tensor = field(default_factory=lambda: torch.tensor([0.9, 0.3, 0.4]))
    correct: float = 0.5
    keep: Tensor = field(default_factory=lambda: torch.full((4,), 0.4))
    redraw: Tensor = field(default_factory=lambda: torch.full((4,), 0.5))
    gumbel: Tensor = field(default_factory=lambda: torch.zeros(4, 3))

    def flip(self, probability: Tensor, lane: int) -> Tensor:
        assert lane == Lane.ACCEPT
        return self.accept < probability

    def pick(self, weights: Tensor, lane: int) -> Tensor:
        assert lane == Lane.RESIDUAL
        return quantile(weights, torch.tensor([[self.correct]])).squeeze(1)

    def fresh_keys(self, lane: int, position: Tensor) -> Any:
        given = {KEEP: self.keep, REDRAW: self.redraw}[cast(Any, lane)][position - FIRST]
        return SimpleNamespace(uniform=lambda *event: given[..., None] if event else given)

    def shared_keys(self, position: Tensor) -> Any:
        return SimpleNamespace(gumbel=lambda size: self.gumbel[position - FIRST])


def verify(given: Given, p: Tensor, q: Tensor, x: Tensor) -> tuple[Draft, Scores, Verdict]:
    draft = Draft.chain(x[None], Kind.IID, Categorical.from_probs(q[None]))
    scores = Scores(Categorical.from_probs(p[None]), FIRST + torch.arange(len(p))[None])
    return draft, scores, Recursive().verify(draft, scores, cast(Noise, given))


def play(suffix: SuffixPolicy, given: Given) -> tuple[Verdict, JacobiWindow]:
    """The verdict on the window above, and the window that follows it."""
    draft, scores, verdict = verify(given, P, Q, X)
    drafter = Jacobi(3, suffix)
    before = JacobiWindow(
        tokens=X[None, :0],
        distribution=as_categorical(scores.distribution),
        num_known=torch.zeros(1, dtype=torch.int64),
        length=drafter.policy.begin(),
        map=None,
        draft_tokens=draft.tokens,
        draft_distribution=as_categorical(draft.distribution),
    )
    count = int(verdict.length)
    done = SimpleNamespace(accepted=(count,), finished=(False,), drafted=(3,), verdict=verdict)
    context = SimpleNamespace(batch=1, device=CPU, noise=given)
    window = drafter.observe(cast(Context, context), before, draft, scores, cast(Round, done))
    return verdict, window


LEANING = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 1.2, 0], [0, 0.3, 0]])  # to token 1
UPRIGHT = torch.tensor([[0, 0, 0], [0, 0, 0], [0, 1.0, 0], [0, 0.2, 0]])
ROUNDS: Mapping[str, tuple[SuffixPolicy, Given, list[int], Tensor]] = {
    "resampled": (Resample(), Given(), [2, 1], P[2]),
    "kept by coupling": (CoupleMax(), Given(), [1, 1], P[2]),
    "redrawn by coupling": (CoupleMax(), Given(keep=torch.full((4,), 0.6)), [2, 1], P[2]),
    "kept by its noise": (CoupleGumbel(), Given(gumbel=LEANING), [1, 1], P[2]),
    "moved by its distribution": (CoupleGumbel(), Given(gumbel=UPRIGHT), [2, 2], P[2]),
    "reused": (ThresholdReuse(0.4), Given(), [1, 1], P[2]),
    "not reused": (ThresholdReuse(0.5), Given(), [2, 1], P[2]),
    "reused as a point": (OneHotReuse(0.4), Given(), [1, 1], POINT),
    "not reused as a point": (OneHotReuse(0.5), Given(), [2, 1], P[2]),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_the_round_is_that_of_the_formula(name: str) -> None:
    """Slot 1 is corrected from (p - q)+ = (0, 0.2, 0.1): its median is token 1."""
    suffix, given, tokens, stored = ROUNDS[name]
    verdict, window = play(suffix, given)
    assert int(verdict.length) == 1
    assert verdict.next is not None
    assert int(verdict.next) == 1
    assert window.tokens.tolist() == [tokens]
    assert_close(window.distribution.probs[0], torch.stack((P[1], stored, P[3])))
    assert not torch.allclose(window.distribution.probs[0, 1], Q[2])  # as released code stores


def test_a_correction_is_drawn_from_what_the_draft_leaves() -> None:
    for uniform, token in ((0.05, 1), (0.68, 2)):  # of (0, 2/3, 1/3); p would give 0 and 1
        _, _, verdict = verify(Given(correct=uniform), P, Q, X)
        assert verdict.next is not None
        assert int(verdict.next) == token


def test_a_window_that_is_accepted_whole_leaves_no_slot() -> None:
    given = Given(accept=torch.tensor([0.9, 0.2, 0.4]), correct=0.65)
    verdict, window = play(CoupleMax(), given)
    assert int(verdict.length) == 3
    assert verdict.next is not None
    assert int(verdict.next) == 2  # of p (0.3, 0.3, 0.4) after the last slot
    assert window.tokens.shape == (1, 0)


@pytest.mark.parametrize(
    ("p", "q", "x", "uniform", "length", "following"),
    [
        pytest.param([0.1, 0.6, 0.3], [1, 0, 0], 0, 0.09, 1, 1, id="guess, accepted with p"),
        pytest.param([0.1, 0.6, 0.3], [1, 0, 0], 0, 0.11, 0, 1, id="guess, rejected"),
        pytest.param([0, 0.6, 0.4], [0.5, 0.5, 0], 0, 1e-9, 0, 2, id="outside top-k of p"),
        pytest.param([0.2, 0.3, 0.5], [0.2, 0.3, 0.5], 1, 1 - 1e-9, 1, 1, id="nothing changed"),
        pytest.param([0, 0, 1], [0.5, 0.5, 0], 1, 1e-9, 0, 2, id="disjoint"),
    ],
)
def test_a_slot_on_its_own(
    p: list[float], q: list[float], x: int, uniform: float, length: int, following: int
) -> None:
    rows = torch.tensor([p, [0.4, 0.3, 0.3]], dtype=torch.float64)
    given = Given(accept=torch.tensor([uniform], dtype=torch.float64))
    _, _, verdict = verify(given, rows, torch.tensor([q], dtype=torch.float64), torch.tensor([x]))
    assert int(verdict.length) == length
    assert verdict.next is not None
    assert int(verdict.next) == following
