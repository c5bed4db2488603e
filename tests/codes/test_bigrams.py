"""The best path through candidates, against all paths; transitions, against counts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.codes.bigrams import Bigrams, best_path
from tests.covering import covering

B, V, N = 5, 5, 4


def random_scores(seed: int) -> tuple[Tensor, Tensor, Bigrams]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, N, V, generator=generator)
    first = torch.randint(V, (B,), generator=generator)
    rows = torch.randint(V, (6, 8), generator=generator).tolist()
    return scores, first, Bigrams(Bigrams.count_pairs(rows), V, alpha=0.1)


def score(
    path: tuple[int, ...], scores: Tensor, first: int, bigrams: Bigrams, weight: float
) -> float:
    total, before = 0.0, torch.tensor(first)
    for place, token in enumerate(path):
        step = bigrams.log_prob(before, torch.tensor(token))
        total += float(scores[place, token]) + weight * float(step)
        before = torch.tensor(token)
    return total


@pytest.mark.exhaustive
@pytest.mark.parametrize(("seed", "weight"), covering(range(3), (0.0, 0.5, 2.0), strength=1))
def test_the_whole_vocabulary_gives_the_best_of_all_paths(seed: int, weight: float) -> None:
    scores, first, bigrams = random_scores(seed)
    found = best_path(scores, first, bigrams, V, weight).tolist()
    for row in range(B):
        every = product(range(V), repeat=N)
        best = max(
            every, key=lambda path: score(path, scores[row], int(first[row]), bigrams, weight)
        )
        assert tuple(found[row]) == best


def test_few_candidates_are_the_likeliest_ones() -> None:
    scores, first, bigrams = random_scores(0)
    found = best_path(scores, first, bigrams, 2, 3.0)
    near = scores.topk(2, -1).indices
    assert bool((near == found[..., None]).any(-1).all())
    assert not torch.equal(found, scores.argmax(-1))


def test_without_transitions_or_with_one_candidate_places_choose_for_themselves() -> None:
    scores, first, bigrams = random_scores(1)
    own = scores.argmax(-1)
    assert torch.equal(best_path(scores, first, None, 1, 0.0), own)
    assert torch.equal(best_path(scores, first, bigrams, V, 0.0), own)
    assert torch.equal(best_path(scores, first, bigrams, 1, 9.0), own)
    assert not torch.equal(best_path(scores, first, bigrams, V, 2.0), own)


def test_a_constant_of_a_place_changes_nothing() -> None:
    scores, first, bigrams = random_scores(2)
    shifted = scores + torch.tensor([3.0, -7.0, 0.5, 11.0])[:, None]
    for width in (2, V):
        found = best_path(scores, first, bigrams, width, 1.0)
        assert torch.equal(found, best_path(shifted, first, bigrams, width, 1.0))


def test_transitions_are_smoothed_counts() -> None:
    rows = [[0, 1, 2, 1], [1, 2], [3]]
    table = Bigrams.count_pairs(rows)
    assert table.tolist() == [[0, 1, 1], [1, 2, 2], [2, 1, 1]]
    bigrams = Bigrams(table, 4, alpha=0.5)
    every = torch.arange(4)
    distributions = bigrams.log_prob(every[:, None], every[None]).exp()
    expected = torch.full((4, 4), 0.5)
    for first, second, count in table.tolist():
        expected[first, second] += count
    assert_close(distributions, expected / expected.sum(-1, keepdim=True))
    assert_close(distributions.sum(-1), torch.ones(4))


def test_without_counts_all_transitions_are_equal() -> None:
    bigrams = Bigrams(Bigrams.count_pairs([]), 4)
    assert_close(bigrams.log_prob(torch.tensor(0), torch.arange(4)).exp(), torch.full((4,), 0.25))


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens 0 to 9, but the vocabulary has 4"):
        Bigrams(torch.tensor([[0, 9, 1]]), 4)
    with pytest.raises(ValueError, match="counted twice"):
        Bigrams(torch.tensor([[0, 1, 1], [0, 1, 2]]), 4)
    with pytest.raises(ValueError, match="makes unseen pairs impossible"):
        Bigrams(Bigrams.count_pairs([[0, 1]]), 4, alpha=0.0)
