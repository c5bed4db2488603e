"""Stored trajectories: exact retrieval, files, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.codes.trajectories import FILE, Trajectories


def store(states: bool = True) -> Trajectories:
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for length in (5, 3, 4):
        seen = torch.randn(length, 8, generator=generator)
        actions = torch.rand(length, 2, generator=generator) * 2 - 1
        drawn.append((seen, actions, seen[:, :2] if states else None))
    return Trajectories.from_episodes(drawn)


def test_what_is_stored_is_found_again() -> None:
    """A moment retrieved by its own features is itself, similarity 1; scale does not matter."""
    held = store()
    similarity, index = held.nearest(3 * held.features, 4)
    assert index[:, 0].tolist() == list(range(12))
    torch.testing.assert_close(similarity[:, 0], torch.ones(12))
    cosine = held.features @ held.features.T
    torch.testing.assert_close(similarity, cosine.sort(-1, descending=True).values[:, :4])
    assert held.nearest(held.features[:1], 99)[1].shape == (1, 12)


def test_what_followed_ends_with_its_episode() -> None:
    held = store()
    assert torch.equal(held.actions_from(3, 3), held.actions[[3, 4, 4]])
    assert torch.equal(held.actions_from(5, 2), held.actions[[5, 6]])


@pytest.mark.parametrize("states", [True, False])
def test_a_folder_holds_it(tmp_path: Path, states: bool) -> None:
    held = store(states)
    path = held.save(tmp_path / "deep")
    for place in (path, tmp_path / "deep"):
        again = Trajectories.load(place)
        torch.testing.assert_close(again.features, held.features, atol=1e-3, rtol=0)
        torch.testing.assert_close(again.actions, held.actions, atol=1e-3, rtol=0)
        assert torch.equal(again.episodes, held.episodes)
        assert (again.states is None) == (not states)


def test_matches_are_those_of_other_episodes() -> None:
    held = store()
    similarity, distance = held.nearest_matches
    for moment in range(12):
        others = held.episodes != held.episodes[moment]
        cosine = (held.features @ held.features[moment])[others]
        assert float(similarity[moment]) == pytest.approx(float(cosine.max()), abs=1e-6)
        assert held.states is not None
        there = held.states[others][cosine.argmax()]
        assert float(distance[moment]) == pytest.approx(float((there - held.states[moment]).norm()))
    alone = Trajectories.from_episodes([(torch.ones(3, 2), torch.ones(3, 2), None)])
    with pytest.raises(ValueError, match="a single stored episode has no matches"):
        _ = alone.nearest_matches


def test_what_does_not_fit(tmp_path: Path) -> None:
    ones, three = torch.ones(2, 3), torch.tensor([0, 0, 1])
    cases: list[tuple[Any, str]] = [
        (lambda: Trajectories(ones, ones, three), "features of shape"),
        (lambda: Trajectories(ones / 0, ones, three[:2]), "features hold NaN"),
        (lambda: Trajectories(ones, ones, torch.tensor([1, 0])), "must not fall"),
        (lambda: Trajectories(ones, ones, three[:2], ones[:1]), "states of shape"),
        (lambda: store().nearest(ones, 1), "of width 3 do not match stored ones of width 8"),
        (
            lambda: Trajectories.from_episodes([(ones, ones, ones), (ones, ones, None)]),
            "some episodes only",
        ),
        (lambda: Trajectories.load(tmp_path), f"give a folder with {FILE}"),
    ]
    for make, words in cases:
        with pytest.raises(ValueError, match=words):
            make()
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no stored trajectories"):
        Trajectories.load(tmp_path)
