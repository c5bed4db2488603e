"""Stochastic beams: paths without replacement, children in the order of their draws."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import mmspec
from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind, Scores
from mmspec.drafters.draft_model import DraftModel, DraftNodes
from mmspec.drafters.trees import stochastic_beam
from mmspec.drafters.trees.stochastic_beam import StochasticBeam, condition_on_largest
from mmspec.verifiers.recursive import Recursive
from tests import toys
from tests.drafters.driving import context
from tests.partners import noisy

E2 = torch.tensor([0.4, 0.35, 0.15, 0.1])


def test_the_largest_child_has_the_score_of_its_parent() -> None:
    noise = torch.Generator().manual_seed(0)
    scores = torch.randn(50, 6, generator=noise)
    scores[:, 5] = -torch.inf
    largest = torch.randn(50, 1, generator=noise)
    found = condition_on_largest(scores, largest)
    torch.testing.assert_close(found.amax(-1, keepdim=True), largest)
    assert torch.equal(found[:, :5].argsort(-1), scores[:, :5].argsort(-1))
    assert bool((found[:, 5] == -torch.inf).all())
    nothing = condition_on_largest(scores, torch.full_like(largest, -torch.inf))
    assert bool((nothing == -torch.inf).all())


def test_siblings_are_draws_without_replacement_whatever_their_parent_scored() -> None:
    """The order of the children of a parent whose score is given; 1e-3 of a false alarm each."""
    rows = 20_000
    noise = torch.rand(rows, 4, generator=torch.Generator().manual_seed(1))
    gumbel = -torch.log(-torch.log(noise))
    largest = torch.where(torch.arange(rows)[:, None] % 2 == 0, 3.0, -3.0)
    pairs = condition_on_largest(E2.log() + gumbel, largest).topk(2, -1).indices
    counts = Counter(map(tuple, pairs.tolist()))
    q = E2.tolist()
    for one, other in permutations(range(4), 2):
        wanted = q[one] * q[other] / (1 - q[one])
        spread = 3.3 * (wanted * (1 - wanted) / rows) ** 0.5
        assert abs(counts[one, other] / rows - wanted) < spread


def run(verifier: str, **settings: Any) -> mmspec.Output:
    model, drafter = toys.model("llama"), noisy("llama")
    request = toys.inputs("llama", batch=2, ragged=True)
    shape = StochasticBeam(depth=3, beam=3)
    fast = mmspec.accelerate(model, "coupled", drafter=drafter, tree=shape, verifier=verifier)
    out: mmspec.Output = fast.generate(**request, max_new_tokens=10, **settings)
    assert out.stats.fallback is None
    return out


def test_greedy_output_is_the_targets() -> None:
    out = run("rejection")
    request = toys.inputs("llama", batch=2, ragged=True)
    wanted = toys.model("llama").generate(**request, max_new_tokens=10)
    assert torch.equal(out.sequences, wanted)
    assert out.stats.mean_acceptance_length > 1.5


def test_sampled_drafts_have_three_paths_a_level() -> None:
    out = run("rejection", do_sample=True, seed=3)
    assert set(out.stats.per_step_drafted) <= {3, 6, 9}
    assert max(out.stats.per_step_drafted) == 9


ROWS = 8000
NOW = context(*[[0]] * ROWS, vocabulary=3)
P = torch.tensor([[0.3, 0.5, 0.2], [0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])  # after token 0, 1, 2
Q = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.1, 0.6], [0.2, 0.7, 0.1]])
PATHS = [(one, other) for one in range(3) for other in range(3)]


class Bigram(DraftModel):
    """The distribution after each token; the context ends with token 0."""

    sees = "nothing"

    def predict_first(self, context: Any, state: Any) -> Categorical:
        return Categorical(Q[0].log().expand(context.batch, 1, -1))

    def predict(self, context: Any, state: Any, nodes: DraftNodes) -> Categorical:
        return Categorical(Q[nodes.tokens].log())


class WithoutNoise(StochasticBeam):
    """Wrong: the likeliest paths as if they were draws, so the rank of a child shows its token."""

    def _select(self, distribution: Categorical, *others: Any) -> Any:
        hard = Categorical(distribution.scores, hard=True)
        return super()._select(hard, *others)


def sampled(shape: StochasticBeam) -> Draft:
    return shape.grow(Bigram(), NOW, None, None, Kind.WOR).draft


def deviations(counts: Tensor, wanted: Tensor) -> float:
    """The largest difference of a frequency, in standard errors."""
    error = (wanted * (1 - wanted) / ROWS).sqrt()
    return float(((counts / ROWS - wanted).abs() / error).max())


def joint_output(shape: StochasticBeam) -> Tensor:  # (3, 3)
    """Expected counts of the next two tokens after verification against P."""
    draft = sampled(shape)
    p = torch.cat((P[:1].expand(ROWS, 1, -1), P[draft.tokens]), 1)
    scores = Scores(Categorical(p.log()), torch.ones(ROWS, draft.nodes + 1, dtype=torch.int64))
    verdict = Recursive().verify(draft, scores, NOW.noise)
    assert verdict.next is not None
    path = draft.tokens.gather(1, verdict.path.clamp_min(0))
    first = torch.where(verdict.length > 0, path[:, 0], verdict.next)
    second = torch.where(verdict.length > 1, path[:, 1], verdict.next)
    after = torch.where(
        verdict.length[:, None] > 0, torch.nn.functional.one_hot(second, 3).float(), P[first]
    )
    return torch.zeros(3, 3).index_add_(0, first, after)


def test_the_sampled_output_is_the_targets() -> None:
    """Both tokens of two levels, jointly."""
    wanted = P[0][:, None] * P
    assert deviations(joint_output(StochasticBeam(depth=2, beam=2)), wanted) < 4
    assert deviations(joint_output(WithoutNoise(depth=2, beam=2)), wanted) > 8


def test_paths_are_draws_without_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two paths of the last level, in their order; wrong: noise of its own on each level."""
    chances = {(one, other): float(Q[0, one] * Q[one, other]) for one, other in PATHS}
    pairs = [*permutations(PATHS, 2)]
    wanted = torch.tensor([chances[a] * chances[b] / (1 - chances[a]) for a, b in pairs])

    def found() -> float:
        draft = sampled(StochasticBeam(depth=2, beam=2))
        whole = torch.stack((draft.tokens.gather(1, draft.parents[:, 2:]), draft.tokens[:, 2:]), -1)
        seen = Counter(tuple(map(tuple, row)) for row in whole.tolist())
        return deviations(torch.tensor([float(seen[pair]) for pair in pairs]), wanted)

    assert found() < 4.5
    monkeypatch.setattr(stochastic_beam, "condition_on_largest", lambda scores, largest: scores)
    assert found() > 8
