"""What is retrieved at a moment: neighbours, their actions, and how far away they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmspec.codes.episodes import Episode
from mmspec.codes.trajectories import Trajectories
from mmspec.draft import Draft
from mmspec.drafters.actions.retrieval import Retrieval, RetrievedMoments
from tests.toys.policies import SPACE

FEATURES = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0.8, 0.6, 0], [0, 0, 1]])
ACTIONS = SPACE.decode(torch.arange(28).view(4, 7) + 20).float()
STATES = torch.tensor([[3.0, 4], [1, 1], [0, 2], [9, 9]])
STORE = Trajectories(FEATURES, ACTIONS, torch.tensor([0, 0, 1, 1]), STATES)


def ids(moment: int) -> list[int]:
    return list(range(20 + 7 * moment, 27 + 7 * moment))


def context(num_generated: int = 0, room: int = 7, **shared: Any) -> Any:
    return SimpleNamespace(
        batch=1,
        history=([5] * 9,),
        finished=(False,),
        device=torch.device("cpu"),
        request=SimpleNamespace(max_new_tokens=room),
        num_left=lambda row: room - num_generated,
        shared=shared,
        num_generated=lambda row: num_generated,
        empty_draft=lambda: Draft.empty(1, torch.device("cpu")),
    )


def robot(*states: list[float]) -> Episode:
    episode = Episode(SPACE)
    for state in states:
        episode.observe(torch.zeros(7), torch.tensor(state))
    return episode


def test_the_nearest_moments_are_those_of_the_last_prompt_token() -> None:
    hidden = torch.stack((FEATURES[3], 2 * FEATURES[0]))[None]  # (1, L, H)
    request = context(room=14, hidden=hidden, episodes=[robot([9.0, 9], [2, 3])])
    (found,) = Retrieval(SPACE, STORE, neighbours=2).begin(request)
    assert found.continuations == [ids(0) + ids(1), ids(2) + ids(3)]  # the actions that followed
    assert found.similarity == pytest.approx(1)
    assert found.distance == pytest.approx(2**0.5)  # of the last state to (3, 4)
    request = context(hidden=hidden, episodes=[robot()])
    assert Retrieval(SPACE, STORE).begin(request)[0].distance == 0
    assert len(Retrieval(SPACE, STORE).begin(request)[0].continuations) == 4


A, B = ids(0), ids(1)


def draft(num_generated: int, room: int, **more: Any) -> tuple[list[int], list[int], int]:
    """Tokens and parents, and the length of the first path."""
    found = [RetrievedMoments([A * 2, B * 2], 0.9, 0.1)]
    made = Retrieval(SPACE, STORE, **more).draft_rows(context(num_generated, room), found, [True])
    assert made.extras is not None
    return made.tokens[0].tolist(), made.parents[0].tolist(), int(made.extras.length)  # type: ignore[attr-defined]


def test_only_a_gate_needs_more_than_can_be_verified() -> None:
    """The last position of an output is the target's own."""
    tokens, parents, length = draft(5, 7)
    assert (tokens, parents, length) == ([A[5], B[5]], [-1, -1], 1)
    tokens, parents, length = draft(5, 7, whole=True)
    assert (tokens, parents, length) == ([A[5], A[6], B[5]], [-1, 0, -1], 2)


def test_paths_stop_where_verification_does() -> None:
    """Two components and the gripper of an action remain, and one more action."""
    tokens, parents, length = draft(4, 14)
    chain = [A[4], A[5], A[6], *A[:6]]
    assert tokens[:length] == chain
    assert parents[:length] == list(range(-1, 8))
    assert tokens[length:] == [B[4], B[5], B[6]]
    assert parents[length:] == [-1, length, length + 1]
