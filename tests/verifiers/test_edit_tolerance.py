"""A prefix of a draft within a share of edits of the target is accepted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Kind, Scores, Verdict
from mmspec.verifiers.coupled import Coupled
from mmspec.verifiers.edit_tolerance import EditTolerance, edits

V = 5


def _slow(one: list[int], other: list[int]) -> int:
    """The recursive definition of the Levenshtein distance."""
    if not one or not other:
        return len(one) + len(other)
    if one[0] == other[0]:
        return _slow(one[1:], other[1:])
    return 1 + min(_slow(one[1:], other), _slow(one, other[1:]), _slow(one[1:], other[1:]))


def _random_chains(rows: int, size: int, seed: int = 0) -> tuple[Draft, Scores, Tensor]:
    """Chains, some of them shorter, a target that says `said`, and that."""
    generator = torch.Generator().manual_seed(seed)
    said = torch.randint(V, (rows, size + 1), generator=generator)
    flips = torch.rand(rows, size, generator=generator) < 0.3
    tokens = torch.where(flips, torch.randint(V, (rows, size), generator=generator), said[:, :-1])
    real = torch.randint(1, size + 1, (rows, 1), generator=generator)
    mask = torch.arange(size) < real
    logits = torch.zeros(rows, size + 1, V).scatter(2, said[..., None], 9.0)
    position = torch.arange(size + 1).expand(rows, -1)
    scores = Scores(Categorical(logits, hard=True), position)
    return Draft.chain(tokens, Kind.DET, mask=mask), scores, said


def _verdict(tau: float, draft: Draft, scores: Scores) -> Verdict:
    noise = KeyedNoise.from_seed(0, draft.batch, torch.device("cpu"))
    return EditTolerance(tau).verify(draft, scores, noise)


def test_edits_are_those_of_the_recursion() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = (torch.randint(3, (40, 6), generator=generator) for _ in range(2))
    found = edits(one, other).tolist()
    for mine, theirs, row in zip(one.tolist(), other.tolist(), found, strict=True):
        assert row == [_slow(mine[:k], theirs[:k]) for k in range(1, 7)]


def test_none_is_coupled_and_more_keeps_more() -> None:
    draft, scores, said = _random_chains(64, 7)
    noise = KeyedNoise.from_seed(0, 64, torch.device("cpu"))
    exact = Coupled().verify(draft, scores, noise)
    found = {tau: _verdict(tau, draft, scores) for tau in (0.0, 0.2, 0.5, 1.0)}
    assert torch.equal(found[0.0].path, exact.path)
    assert found[0.0].next is not None
    assert exact.next is not None
    assert torch.equal(found[0.0].next, exact.next)
    lengths = torch.stack([one.length for one in found.values()])
    assert bool((lengths[1:] >= lengths[:-1]).all())
    assert bool((lengths[-1] > lengths[0]).any())
    for tau, one in found.items():
        assert one.next is not None
        for row, length in enumerate(one.length.tolist()):
            mine, theirs = draft.tokens[row, :length].tolist(), said[row, :length].tolist()
            assert _slow(mine, theirs) <= tau * length + 1e-9
            assert bool(draft.mask[row, :length].all())
            assert int(one.next[row]) == int(said[row, length])
            if length:
                assert mine[-1] == theirs[-1]
            if tau:
                assert one.excess is not None
                assert int(one.excess[row]) == sum(
                    a != b for a, b in zip(mine, theirs, strict=True)
                )
    assert EditTolerance(0).lossless
    assert not EditTolerance(0.1).lossless


def test_nothing_drafted_and_what_is_no_share() -> None:
    _, scores, said = _random_chains(2, 3)
    empty = Scores(scores.distribution[:, :1], scores.position[:, :1])
    found = _verdict(0.5, Draft.empty(2, torch.device("cpu")), empty)
    assert found.length.tolist() == [0, 0]
    assert found.next is not None
    assert found.next.tolist() == said[:, 0].tolist()
    with pytest.raises(ValueError, match=r"tau=1\.5"):
        EditTolerance(1.5)
