"""CTC: collapsing, entropies and confidences, and prefix scores against all paths."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mmspec.codes.ctc import (
    PrefixScorer,
    Run,
    align,
    collapse,
    confidences,
    entropies,
    greedy,
    runs,
    search_prefixes,
    uncertainty,
)


def posteriors(frames: int, labels: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    scores = torch.randn(frames, labels, generator=torch.Generator().manual_seed(seed))
    return (scale * scores).double().log_softmax(-1)


def test_a_path_is_collapsed() -> None:
    a, b, blank = 1, 2, 0
    assert collapse([a, a, blank, a, b, b, blank]) == [a, a, b]
    assert collapse([]) == collapse([blank] * 3) == []
    assert runs([0, 1, 1, 0, 2]) == [Run(1, 1, 3), Run(2, 4, 5)]
    assert collapse([3, 3, 0, 0], blank=3) == [0]


def test_rows_are_read_up_to_their_padding() -> None:
    sure = torch.full((2, 4, 3), -20.0)
    sure[0, torch.arange(4), torch.tensor([1, 1, 0, 2])] = 0
    sure[1, torch.arange(4), torch.tensor([2, 0, 2, 1])] = 0
    seen = torch.tensor([[True] * 4, [True, True, False, False]])
    said = [[run.label for run in row] for row in greedy(sure, seen)]
    assert said == [[1, 2], [2]]


def test_entropies_have_known_ends_and_padding_has_none() -> None:
    sure = torch.tensor([[0.0, -torch.inf, -torch.inf]]).expand(4, 3)
    even = torch.full((4, 3), 1 / 3).log()
    assert entropies(sure).tolist() == [0] * 4
    assert_close(entropies(even), torch.full((4,), math.log(3)))
    both = torch.stack((sure, torch.cat((sure[:2], even[:2]))))
    assert_close(uncertainty(both), torch.tensor([0.0, math.log(3)]))
    seen = torch.tensor([[True] * 4, [True, True, False, False]])
    assert uncertainty(both, seen).tolist() == [0, 0]
    assert uncertainty(both, seen & False).tolist() == [math.inf] * 2
    soft = torch.tensor([[[0.6, 0.4], [0.1, 0.9]]]).log()  # the blank's frame is the less sure one
    assert uncertainty(soft)[0] > uncertainty(soft, blank=0)[0]
    assert_close(uncertainty(soft, blank=0)[0], entropies(soft)[0, 1])


def test_a_run_is_as_sure_as_its_frames() -> None:
    frames = torch.tensor([[0.1, 0.9], [0.4, 0.6], [0.8, 0.2]]).log()
    said = runs(frames.argmax(-1).tolist())
    assert said == [Run(1, 0, 2)]
    assert_close(confidences(frames, said), torch.tensor([0.9]))
    assert_close(confidences(frames, said, "mean"), torch.tensor([0.75]))
    assert_close(confidences(frames, said, "min"), torch.tensor([0.6]))
    assert confidences(frames, []).shape == (0,)


def every_text(log_probs: Tensor) -> dict[tuple[int, ...], float]:
    """The probability of all texts, path by path."""
    found: dict[tuple[int, ...], float] = {}
    frames, labels = log_probs.shape
    for path in product(range(labels), repeat=frames):
        weight = math.exp(sum(float(log_probs[t, c]) for t, c in enumerate(path)))
        text = tuple(collapse(path))
        found[text] = found.get(text, 0.0) + weight
    return found


def test_prefix_scores_are_those_of_all_paths() -> None:
    log_probs = posteriors(5, 3)
    texts = every_text(log_probs)
    scorer = PrefixScorer(log_probs)
    for prefix in ((), (1,), (1, 1), (1, 2), (2, 1, 2), (2, 2, 2)):
        scorer.pop(len(scorer.labels))
        for label in prefix:
            scorer.push(label)
        begun = sum(w for text, w in texts.items() if text[: len(prefix)] == prefix)
        assert math.exp(scorer.total) == pytest.approx(begun, abs=1e-12)
        assert math.exp(scorer.end()) == pytest.approx(texts.get(prefix, 0.0), abs=1e-12)


@pytest.mark.parametrize(
    ("frames", "labels", "scale"), [(6, 3, 1.0), (40, 12, 4.0), (400, 30, 8.0)]
)
def test_a_prefix_is_the_sum_of_what_may_follow(frames: int, labels: int, scale: float) -> None:
    """psi(h) = psi(h end) + sum over c of psi(h c), and psi(h end) is what `ctc_loss` gives."""
    log_probs = posteriors(frames, labels, seed=1, scale=scale)
    scorer, text = PrefixScorer(log_probs), collapse(log_probs.argmax(-1).tolist())[:12]
    others = torch.arange(1, labels)
    assert scorer.total == 0
    for label in [*text, None]:
        follows = torch.cat(
            (scorer.score(others), torch.tensor([scorer.end()], dtype=torch.float64))
        )
        assert float(follows.logsumexp(0)) == pytest.approx(scorer.total, abs=1e-9)
        loss = torch.nn.functional.ctc_loss(
            log_probs[:, None],
            torch.tensor([scorer.labels], dtype=torch.int64),
            torch.tensor([frames]),
            torch.tensor([len(scorer.labels)]),
            reduction="none",
        )
        assert -float(loss) == pytest.approx(scorer.end(), abs=1e-9)
        if label is not None:
            wanted = float(scorer.score(torch.tensor([label])))
            scorer.push(label)
            assert scorer.total == wanted


def test_taking_back_gives_the_very_scores_again() -> None:
    scorer = PrefixScorer(posteriors(20, 6))
    others = torch.arange(6)
    scorer.push(3)
    before = scorer.score(others)
    for label in (3, 1, 4):
        scorer.push(label)
    after = scorer.score(others)
    scorer.pop(3)
    assert torch.equal(scorer.score(others), before)
    for label in (3, 1, 4):
        scorer.push(label)
    assert torch.equal(scorer.score(others), after)
    assert scorer.labels == [3, 3, 1, 4]
    assert before[0] == -torch.inf


def test_a_repeated_label_without_a_blank_between_is_overrated() -> None:
    """Negative control: paths that end in the same label cannot begin it again."""
    log_probs = posteriors(5, 3)
    scorer = PrefixScorer(log_probs)
    scorer.push(1)
    ends, blanks = (state[:-1] for state in scorer.stack[-1])
    wrong = (torch.logaddexp(ends, blanks) + log_probs[:, 1]).logsumexp(0)
    assert float(scorer.score(torch.tensor([1]))) < float(wrong) - 1e-3


def test_impossible_labels_and_too_many_of_them() -> None:
    log_probs = torch.full((3, 3), -torch.inf, dtype=torch.float64)
    log_probs[:, 1] = 0  # every frame says 1
    scorer = PrefixScorer(log_probs)
    assert float(scorer.score(torch.tensor([1]))) == pytest.approx(0, abs=1e-12)
    assert float(scorer.score(torch.tensor([2]))) < -900
    scorer.push(1)
    assert scorer.end() == pytest.approx(0, abs=1e-12)
    scorer.push(1)  # would need a blank
    assert scorer.total < -900
    with pytest.raises(ValueError, match="label 0 is the blank"):
        scorer.push(0)
    with pytest.raises(ValueError, match="3 labels cannot be removed: there are 2"):
        scorer.pop(3)


def test_given_labels_are_laid_over_the_frames() -> None:
    log_probs = posteriors(12, 5, seed=3)
    text = collapse(log_probs.argmax(-1).tolist())
    assert align(log_probs, text) == greedy(log_probs[None])[0]
    other = align(log_probs, [2, 2, 4])
    assert [run.label for run in other] == [2, 2, 4]
    assert all(a.stop <= b.start for a, b in pairwise(other))
    with pytest.raises(ValueError, match="3 labels, 2 of them repeated, need 5 frames"):
        align(log_probs[:4], [1, 1, 1])
    assert align(log_probs, []) == []


@pytest.mark.parametrize(("slots", "labels"), [(1, 2), (4, 2), (5, 3)])
def test_texts_of_a_whole_beam_are_those_of_all_paths(slots: int, labels: int) -> None:
    """Every path counts for its text; with one text per slot the likeliest may be missed."""
    generator = torch.Generator().manual_seed(slots)
    probs = torch.rand(slots, labels + 1, generator=generator, dtype=torch.float64)
    probs /= probs.sum(-1, keepdim=True)
    rows, blanks = probs[:, :-1].tolist(), probs[:, -1].tolist()
    expected: dict[tuple[int, ...], float] = {}
    for path in product(range(labels + 1), repeat=slots):
        text = tuple(collapse(path, labels))
        own = math.prod(float(probs[at, label]) for at, label in enumerate(path))
        expected[text] = expected.get(text, 0.0) + own
    given = [dict(enumerate(row)) for row in rows]
    found = search_prefixes(given, blanks, 10_000)
    assert {text for text, _ in found} == set(expected)
    for text, prob in found:
        assert prob == pytest.approx(expected[text], abs=1e-12)
    assert [prob for _, prob in found] == sorted((prob for _, prob in found), reverse=True)
    assert len(search_prefixes(given, blanks, 2)) == 2


def test_a_repeated_label_without_a_blank_is_one_label() -> None:
    """Two sure slots of one label are that label once."""
    found = search_prefixes([{7: 0.9}, {7: 0.9}], [0.1, 0.1], 8)
    assert found[0][0] == (7,)
    assert found[0][1] == pytest.approx(0.99)
    assert dict(found)[()] == pytest.approx(0.01)
    assert (7, 7) not in dict(found)
