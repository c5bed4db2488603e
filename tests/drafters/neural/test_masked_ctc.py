"""Transcripts with masks: what is uncertain, what is proposed, and what the decoder refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind, Scores
from mmspec.drafters.neural.masked_ctc import (
    MaskedCtcDraft,
    MaskedCtcState,
    MaskedTranscript,
    token_confidences,
)
from mmspec.targets.readers.reader import CtcOutput

END, LABELS = 9, 6  # labels 1 to 5 are the tokens 11 to 15


def frames(*likely: tuple[int, float]) -> Tensor:  # (T, V) of a label and its probability each
    rows = torch.stack([torch.full((LABELS,), (1 - share) / (LABELS - 1)) for _, share in likely])
    for row, (label, share) in zip(rows, likely, strict=True):
        row[label] = share
    return rows.log()


LONG = frames((1, 0.9), (0, 0.9), (2, 0.4), (2, 0.5), (3, 0.6), (0, 0.8))
SHORT = frames((4, 0.9), (5, 0.3))
NOISE = frames(*[(1, 0.99), (2, 0.99)] * 2)  # behind the short one


def drafter(sure: float = 0.55) -> MaskedCtcDraft:
    return MaskedCtcDraft(
        spelling=lambda labels: [label + 10 for label in labels],
        spell=lambda token: () if token == END else (token - 10,),
        end=END,
        sure=sure,
        weight=0.3,
        max_candidates=3,
    )


def begin(made: MaskedCtcDraft, room: int = 20, sound: bool = True) -> MaskedCtcState:
    mask = torch.arange(6) < torch.tensor([[6], [2]])
    output = CtcOutput(None, torch.stack((LONG, torch.cat((SHORT, NOISE)))), mask, 0)
    request = SimpleNamespace(max_new_tokens=room)
    shared = {"ctc": output if sound else None}
    return made.begin(SimpleNamespace(batch=2, request=request, shared=shared))


def test_tokens_below_the_limit_are_masked_and_padding_is_not_heard() -> None:
    state = begin(drafter())
    assert [row.tokens for row in state.rows] == [[11, 12, 13, END], [14, 15, END]]
    assert [row.masked for row in state.rows] == [[False, True, False, False], [False, True, False]]
    for scorer, own in zip(state.joint.scorers, (LONG, SHORT), strict=True):
        assert scorer is not None
        assert torch.equal(scorer.frames, own.double())
    assert (state.joint.weight, state.joint.max_candidates, state.joint.end) == (0.3, 3, END)


def test_a_token_at_the_limit_is_sure() -> None:
    limit = float(LONG[3, 2].exp())  # of the two frames the surer one
    assert begin(drafter(limit)).rows[0].masked == [False, False, False, False]
    assert begin(drafter(limit + 1e-6)).rows[0].masked == [False, True, False, False]


def test_a_transcript_is_no_longer_than_the_output() -> None:
    state = begin(drafter(), room=2)
    assert [row.tokens for row in state.rows] == [[11, 12], [14, 15]]
    assert [row.masked for row in state.rows] == [[False, True], [False, True]]
    silent = begin(drafter(), sound=False)
    assert [row.tokens for row in silent.rows] == [[], []]
    assert silent.joint.scorers == [None, None]


def test_the_first_pass_masks_what_the_decoder_would_not_write() -> None:
    """The whole texts are proposed once; later only what is certain behind the last mask."""
    made = drafter()
    state = begin(made)
    written: list[list[int]] = [[], []]
    context: Any = SimpleNamespace(
        generated_tokens=lambda: written, finished=[False, False], device=torch.device("cpu")
    )
    draft = made.propose(context, state)
    assert draft.tokens.tolist() == [[11, 12, 13, END], [14, 15, END, 0]]
    assert draft.mask.tolist() == [[True] * 4, [True] * 3 + [False]]
    own = torch.tensor([[11, 12, 13, 7, 8], [13, 15, END, 8, 8]])  # the decoder's choices
    scores = Scores(
        Categorical(torch.nn.functional.one_hot(own, 16).float()), torch.arange(5).expand(2, -1)
    )
    round_: Any = SimpleNamespace(accepted=[1, 0])
    made.observe(context, state, draft, scores, round_)
    assert [row.masked for row in state.rows] == [[False, True, False, True], [True, True, False]]
    written = [[11, 13], [12]]
    draft = made.propose(context, state)
    assert draft.tokens.tolist() == [[13], [END]]
    assert state.joint.scorers[0].labels == [1, 3]  # type: ignore[union-attr]
    assert state.joint.scorers[1].labels == [2]  # type: ignore[union-attr]
    again = Scores(scores.distribution[:, :2], scores.position[:, :2])
    made.observe(context, state, Draft.chain(draft.tokens, Kind.DET), again, round_)
    assert state.rows[1].masked == [True, True, False]  # a later pass masks nothing of its own


def test_a_span_behind_a_mask_is_proposed_until_its_first_token_is_written() -> None:
    transcript = MaskedTranscript([5, 6, 7, 8, 9], [False, False, True, False, False])
    assert transcript.next_span(whole=True) == [5, 6, 7, 8, 9]
    transcript.learn(2)  # 5 6 and something else
    assert transcript.masked == [False, False, True, False, False]
    assert transcript.next_span(whole=False) == [8, 9]
    transcript.learn(0)  # not yet
    assert transcript.masked[3] is False
    assert transcript.next_span(whole=False) == [8, 9]
    transcript.learn(1)  # 8, and then something else than 9
    assert transcript.masked[4] is True
    assert transcript.next_span(whole=False) == []


def test_a_refused_token_is_masked_unless_the_text_is_in_a_mask() -> None:
    transcript = MaskedTranscript([5, 6, 7], [False, False, False])
    assert transcript.next_span(whole=False) == [5, 6, 7]
    transcript.learn(0)
    assert transcript.masked == [True, False, False]
    assert transcript.next_span(whole=False) == [6, 7]
    transcript.learn(2)  # all that was proposed: nothing is masked behind the end
    assert transcript.masked == [True, False, False]
    assert transcript.next_span(whole=False) == []


def test_tokens_are_as_sure_as_their_least_sure_letter() -> None:
    sure = [0.1, 0.9, 0.8, 0.7]
    assert token_confidences([[97, 98], [99]], [32, 97, 98, 99], sure) == [0.8, 0.7]
    assert token_confidences([[97], [99]], [97, 98, 99, 100], sure) == [0.1, 0.1]
    assert token_confidences([[]], [], []) == [1.0]
    assert token_confidences([[], [97]], [97], [0.4]) == [1.0, 0.4]
