"""Stochastic beams: paths without replacement, children in the order of their draws."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import torch

import mmspec
from mmspec.drafters.trees.stochastic_beam import StochasticBeam, condition_on_largest
from tests import toys
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
