"""HeiSD: what is retrieved, who drafts, what is kept unread, and what is learned from that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.codes.action_constants import ActionConstants
from mmspec.codes.actions import ActionCodes, ActionSpace
from mmspec.codes.episodes import Episode
from mmspec.codes.trajectories import Retrieved, Trajectories
from mmspec.draft import Draft
from mmspec.drafters.actions.retrieval import Retrieval, RetrievedMoments
from mmspec.verifiers.similarity_gate import SimilarityGate
from tests.toys.policies import SCENES, SPACE, act, plain, remembering, robot, store

QUICK: dict[str, Any] = {"cut": 0.0, "window": 15}  # everything but a cold start is retrieved
SURE: dict[str, Any] = {"theta": -1.0, "delta": float("inf")}
NEVER: dict[str, Any] = {"theta": 2.0, "delta": 0.0}


def moving(steps: int = 16) -> Episode:
    """A robot on its way, fast enough for `QUICK`."""
    ids = torch.tensor(plain(1, scene=9)[0]).repeat(steps, 1)
    return remembering(ids + torch.arange(steps)[:, None] % 3 - 1)


def wrong(scene: int = 0) -> Trajectories:
    """The same moments, but all did the same that no scene asks for."""
    held = store()
    return Trajectories(held.features, held.actions * 0 + 0.015, held.episodes)


def test_what_was_stored_of_a_scene_is_drafted_there() -> None:
    acting = [at for at in SCENES if SPACE.codes.contains(torch.tensor(plain(1, scene=at))).all()]
    assert len(acting) > 1  # a toy may say words in the place of an action
    for scene in acting:
        (wanted,) = plain(1, scene=scene)
        found, rounds = act(robot("retrieval"), [Episode(SPACE)], scene=scene)
        assert found == [wanted]
        assert [kept.accepted[0] for kept in rounds] == [0, 5]


def retrieval(
    actions: list[list[list[int]]], **more: Any
) -> tuple[Retrieval, list[RetrievedMoments]]:
    """A drafter beside what it found: the whole answers of some neighbours."""
    return Retrieval(SPACE, store(), **more), [RetrievedMoments(actions[0], 0.9, 0.1)]


class _Context:
    """As much of a context as a retrieval asks for when it drafts."""

    def __init__(self, num_generated: int, room: int = 7) -> None:
        self.batch, self._num_generated = 1, num_generated
        self.history, self.finished, self.device = ([5] * 9,), (False,), torch.device("cpu")
        self.request = type("Request", (), {"max_new_tokens": room})()

    def num_generated(self, row: int) -> int:
        return self._num_generated

    def num_left(self, row: int) -> int:
        return int(self.request.max_new_tokens) - self._num_generated

    def empty_draft(self) -> Draft:
        return Draft.empty(1, self.device)


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Tokens from the context to each leaf."""
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    lines: dict[int, tuple[int, ...]] = {-1: ()}
    for node, parent in enumerate(parents):
        lines[node] = (*lines[parent], tokens[node])
    return {line for node, line in lines.items() if node not in parents and node >= 0}


A, B = [21, 22, 23, 31, 32, 33, 41], [51, 52, 53, 61, 62, 63, 71]


def test_groups_of_different_neighbours_are_combined_and_grippers_are_not() -> None:
    drafter, found = retrieval([[A, B]], whole=True)
    context: Any = _Context(1)
    draft = drafter.draft_rows(context, found, [True])
    assert draft.tokens[0, :6].tolist() == A[1:]  # the nearest action, whole
    assert isinstance(draft.extras, Retrieved)
    assert draft.extras.length.tolist() == [6]
    cut = {line[:5] for line in paths(draft)}  # verification uses no gripper: it comes as a bonus
    wanted = {(*p[1:3], *r[3:6]) for p in (A, B) for r in (A, B)}
    assert cut == wanted
    deep: Any = _Context(1, 14)
    chains = paths(drafter.draft_rows(deep, [RetrievedMoments([A * 2, B * 2], 0.9, 0.1)], [True]))
    assert {line[5] for line in chains if line[0] == 22} == {41}  # the position's own gripper
    assert {line[5] for line in chains if line[0] == 52} == {71}


def test_without_a_gate_no_node_is_drafted_that_cannot_be_kept() -> None:
    drafter, found = retrieval([[A, B]])
    context: Any = _Context(3)
    assert paths(drafter.draft_rows(context, found, [True])) == {(31, 32, 33), (61, 62, 63)}
    last: Any = _Context(6)
    assert drafter.draft_rows(last, found, [True]).nodes == 0
    assert drafter.draft_rows(context, found, [False]).nodes == 0


def test_the_way_a_robot_moves_decides_who_drafts() -> None:
    """A cold start is the head's, and so is everything that scores below the cut."""
    for options, episode, retrieved in (
        (QUICK, moving(), True),
        (QUICK, moving(14), False),
        ({"cut": 1.01}, moving(), False),
    ):
        found, rounds = act(robot("heisd", **options, **NEVER, bias=0.0, radius=0.0), [episode])
        assert found == plain(1)
        assert (rounds[1].accepted[0] >= 5) == retrieved  # the head knows nothing


def test_a_refused_action_is_the_head_s() -> None:
    bound = robot("heisd", **QUICK, **NEVER, bias=0.0, radius=0.0, store=wrong())
    found, rounds = act(bound, [moving()])
    assert found == plain(1)
    assert rounds[1].drafted[0] == 6  # one path of the store: all neighbours say the same
    assert all(kept.drafted[0] > 6 for kept in rounds[2:4])


def test_rows_have_sources_of_their_own_and_the_head_learns_from_both() -> None:
    bound = robot("heisd", **QUICK, **NEVER, bias=0.0, radius=0.0)
    episodes = [moving(), Episode(SPACE), moving(3)]
    found, rounds = act(bound, episodes)
    assert found == plain(3)
    assert rounds[1].accepted[0] >= 5
    mixed = [moving(), Episode(SPACE)]
    other = robot("heisd", **QUICK, **NEVER, bias=0.0, radius=0.0, store=wrong())
    found, _ = act(other, mixed)
    assert found == plain(2)


def test_alike_moments_are_done_again_unread() -> None:
    held = wrong()
    bound = robot("heisd", **QUICK, **SURE, store=held)
    episode, calls = moving(), []
    for _ in range(7):
        found, rounds = act(bound, [episode])
        calls.append(sum(kept.calls for kept in rounds))
        if calls[-1] == 0:
            first = plain(1)[0][0]  # the prefill's
            assert found[0] == [first, *SPACE.encode(held.actions[0]).tolist()[1:]]
            assert sum(len(kept.tokens[0]) for kept in rounds if kept.is_unverified) == 6
        episode.observe(SPACE.decode(torch.tensor(found[0])))
    assert [bool(one) for one in calls] == [False] * 4 + [True] + [False] * 2


def test_thresholds_decide_row_by_row() -> None:
    held = store()
    bound = robot("heisd", **QUICK, theta=0.999, delta=float("inf"))
    (known,) = plain(1, scene=0)
    episodes = [moving(), moving()]  # the second row's prompt is not stored
    found, rounds = act(bound, episodes)
    assert [bool(row) for row in rounds[1].tokens] == [True, False]
    assert rounds[1].is_unverified
    assert found[0] == known
    assert [episode.skips for episode in episodes] == [1, 0]
    assert held.count == 72


def test_a_distance_keeps_the_gate_shut() -> None:
    held = store()
    states = torch.arange(held.count).float()[:, None].expand(-1, 2)
    placed = Trajectories(held.features, held.actions, held.episodes, states)
    for place, skips in ((0.0, True), (50.0, False)):
        episode = Episode(SPACE)
        for _ in range(16):
            episode.observe(torch.rand(7), torch.full((2,), place))
        bound = robot("heisd", **QUICK, theta=0.9, delta=1.0, store=placed)
        _, rounds = act(bound, [episode])  # the stored moment of scene 0 is at 0
        assert any(kept.is_unverified for kept in rounds) == skips
    episode = Episode(SPACE)
    for _ in range(16):
        episode.observe(torch.rand(7), torch.zeros(3))
    with pytest.raises(AssertionError, match=r"a state of 3 numbers is compared with .* of 2"):
        act(robot("heisd", **QUICK, store=placed), [episode])


def test_the_threshold_learns_from_how_tasks_end() -> None:
    gate = SimilarityGate(0.8, 1.0, min_theta=0.2)
    assert gate.threshold([]) == 0.8
    assert gate.threshold([True]) == pytest.approx(0.74)
    assert gate.threshold([False]) == pytest.approx(0.81)
    failing = [gate.threshold([False] * count) for count in range(200)]
    assert failing == sorted(failing)
    assert failing[-1] < 1
    winning = [gate.threshold([True] * count) for count in range(200)]
    assert winning == sorted(winning, reverse=True)
    assert winning[-1] == pytest.approx(0.2, abs=1e-6)


def test_a_threshold_above_every_cosine_stays_there() -> None:
    """Whatever is learned: bias=0, radius=0 and theta=2 are plain decoding in every episode."""
    bound = robot("heisd", **QUICK, theta=2.0, delta=float("inf"), bias=0.0, radius=0.0)
    episode = moving()
    episode.outcomes = [True] * 9
    found, rounds = act(bound, [episode])
    assert found == plain(1)
    assert not any(kept.is_unverified for kept in rounds)
    assert SimilarityGate(2.0, 1.0).threshold([False, True]) == 2.0


def test_thresholds_come_from_the_store() -> None:
    similarity, _ = store().nearest_matches
    gate = SimilarityGate.from_store(store())
    assert gate.theta == pytest.approx(float(similarity.quantile(0.9)))
    assert gate.min_theta == pytest.approx(float(similarity.min()))
    assert SimilarityGate.from_store(store(), 0.5, 3.0).theta == 0.5


def test_a_folder_may_hold_the_store(tmp_path: Path) -> None:
    store().save(tmp_path)
    found, rounds = act(robot("retrieval", store=str(tmp_path)), [Episode(SPACE)])
    assert found == plain(1)
    assert rounds[1].accepted[0] == 5


def test_what_does_not_fit() -> None:
    other = ActionSpace.from_statistics({"q01": [0, 0], "q99": [1, 1]}, ActionCodes(140, 128))
    cases: list[tuple[Any, str]] = [
        (lambda: robot("retrieval", store=None), "no stored trajectories; give store="),
        (lambda: robot("heisd", store=None), "no stored trajectories; give store="),
        (lambda: robot("retrieval", store=5), "store=5 is neither Trajectories nor a folder"),
        (lambda: robot("retrieval", store="nowhere"), "nowhere holds no stored trajectories"),
        (lambda: robot("retrieval", neighbours=0), "neighbours=0"),
        (lambda: Retrieval(other, store()), "stored actions have 7 components, .* policy 2"),
        (lambda: SimilarityGate(0.5, -1.0), "delta=-1.0 must be a number of at least 0"),
        (lambda: SimilarityGate(0.5, 1.0, max_skips=0), "most_skips=0"),
    ]
    for make, words in cases:
        with pytest.raises(ValueError, match=words):
            make()


def test_fitted_thresholds_are_those_of_the_file_unless_given(tmp_path: Path) -> None:
    ActionConstants(theta=0.75, delta=0.5).save(tmp_path)
    gate: Any = robot("heisd", window=3, constants=str(tmp_path)).gate
    assert (gate.theta, gate.delta) == (0.75, 0.5)
    gate = robot("heisd", window=3, constants=str(tmp_path), theta=0.25).gate
    assert (gate.theta, gate.delta) == (0.25, 0.5)
