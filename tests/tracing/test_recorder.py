"""Recorded drafts: trees with padding, ranks of ties, frames and states of a chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind, Round, Scores, Verdict
from mmspec.tracing.recorder import MAX_STATES, RoundRecorder, round_digits


def make_round(index: int, tokens: Any, path: Any = ((),), drafted: Any = (0,)) -> Round:
    lengths = torch.tensor([len(row) for row in path])
    verdict = Verdict(torch.full((len(path), 1), -1), lengths, lengths)
    accepted = tuple(len(row) for row in path)
    takes = tuple(len(new) > count for new, count in zip(tokens, accepted, strict=True))
    done = (False,) * len(path)
    return Round(index, drafted, accepted, path, takes, tokens, done, verdict)


def record(recorder: RoundRecorder, round_: Round, draft: Draft, scores: Any = None) -> None:
    recorder.watch(draft, scores, round_, lambda: None)
    recorder.add(round_)


def scores_of(probs: Tensor) -> Scores:  # (B, N + 1, V)
    return Scores(Categorical(probs.log()), torch.zeros(probs.shape[:2]))


def test_padding_is_left_out_and_parents_are_counted_without_it() -> None:
    tokens = torch.tensor([[5, 6, 7], [3, 0, 4]])
    parents = torch.tensor([[-1, -1, 1], [-1, -1, 0]])
    mask = torch.tensor([[True, True, True], [True, False, True]])
    draft = Draft(tokens, parents, mask, Kind.DET)
    round_ = make_round(1, ((6, 7, 1), (3, 4, 2)), ((1, 2), (0, 2)), (3, 2))
    recorder = RoundRecorder()
    recorder.begin_part()
    record(recorder, round_, draft, scores_of(torch.rand(2, 4, 9)))
    first, second = recorder.read()[0]["rows"]
    assert (first["draft"], first["parents"], first["path"]) == ([5, 6, 7], [-1, -1, 1], [1, 2])
    assert (second["draft"], second["parents"], second["path"]) == ([3, 4], [-1, 0], [0, 1])
    assert len(second["p"]) == len(second["rank"]) == 2
    assert "q" not in first


def test_probabilities_and_ranks_are_those_after_the_parent() -> None:
    probs = torch.tensor([[[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]]])
    drawn = torch.tensor([[[0.25, 0.75, 0.0], [0.9, 0.0, 0.1]]])
    tokens = torch.tensor([[2, 0]])
    draft = Draft.chain(tokens, Kind.IID, Categorical(drawn.log()))
    recorder = RoundRecorder()
    recorder.begin_part()
    record(recorder, make_round(1, ((2, 0, 2),), ((0, 1),), (2,)), draft, scores_of(probs))
    (row,) = recorder.read()[0]["rows"]
    assert row["p"] == [pytest.approx(0.3), pytest.approx(0.5)]
    assert row["q"] == [pytest.approx(0.0), pytest.approx(0.9)]
    assert row["rank"] == [2, 1]


def test_a_finished_row_has_no_draft() -> None:
    draft = Draft.chain(torch.tensor([[1], [1]]), Kind.DET)
    recorder = RoundRecorder()
    recorder.begin_part()
    record(recorder, make_round(1, ((1,), ()), ((0,), ()), (1, 0)), draft)
    assert [row["draft"] for row in recorder.read()[0]["rows"]] == [[1], []]


def test_frames_are_lists_of_codes() -> None:
    frames = torch.tensor([[[1, 2], [3, 4]]])
    draft = Draft.chain(frames, Kind.DET)
    recorder = RoundRecorder()
    recorder.begin_part()
    record(recorder, make_round(1, ((frames[0, 0], torch.tensor([7, 8])),), ((0,),), (2,)), draft)
    assert recorder.kind == "frames"
    (row,) = recorder.read()[0]["rows"]
    assert row["tokens"] == [[1, 2], [7, 8]]
    assert row["draft"] == [[1, 2], [3, 4]]


def test_states_are_named_by_their_step_and_thinned() -> None:
    recorder = RoundRecorder()
    recorder.begin_part()
    for index in range(40):
        states = torch.full((1, 2, 3), float(index))
        made = make_round(index, ((states[0, 0], states[0, 1]),), ((0,),), (2,))
        record(recorder, made, Draft.chain(states, Kind.RACE))
    rounds = recorder.read()
    assert rounds[3]["rows"][0]["tokens"] == [7, 8]
    assert rounds[3]["rows"][0]["draft"] == [7, 8]
    (kept,) = recorder.states
    assert 80 in kept  # the last state
    assert len(kept) <= MAX_STATES
    assert all(state[0] == (step - 1) // 2 for step, state in kept.items())


def test_parts_are_counted_and_numbers_short() -> None:
    recorder = RoundRecorder()
    for _ in range(2):
        recorder.begin_part()
        record(recorder, make_round(0, ((4,),)), Draft.empty(1, torch.device("cpu")))
    assert [(one["round"], one["part"]) for one in recorder.read()] == [(0, 0), (1, 1)]
    assert round_digits(0.123456789) == 0.1235
    assert round_digits(float("nan")) is None
    assert round_digits(float("-inf")) is None
