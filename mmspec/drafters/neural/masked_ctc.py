"""A transcript of the encoder with its doubtful spans masked: what lies between is proposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.ctc import PrefixScorer, Run, confidences, greedy
from mmspec.codes.joint import JointScorer
from mmspec.draft import Draft, Kind, Round, Scores, categorical
from mmspec.drafters.neural.ctc_draft import OfEncoder

Labels = Callable[[int], Sequence[int]]  # of a token of the target


@dataclass
class MaskedTranscript:
    """One row: what was heard, which of it is doubted, and how far the text has come."""

    tokens: list[int]
    masked: list[bool]
    at: int = 0  # the token of it that is to come next
    is_open: bool = False  # whether the text is inside a mask: at its end, `at` waits
    proposed: int = 0

    def known(self, whole: bool) -> list[int]:
        """The tokens to propose: up to the next mask, or all of them."""
        if not whole:
            while self.at < len(self.tokens) and self.masked[self.at]:
                self.at, self.is_open = self.at + 1, True
        stop = self.at
        while stop < len(self.tokens) and (whole or not self.masked[stop]):
            stop += 1
        self.proposed = stop - self.at
        return self.tokens[self.at : stop]

    def learn(self, accepted: int) -> None:
        """Go on behind what was accepted; the token refused becomes a mask, unless one is open."""
        refused = accepted < self.proposed
        if accepted:
            self.at, self.is_open = self.at + accepted, False
        if refused and not self.is_open:
            self.masked[self.at] = True
        self.is_open = True  # one more token was written, and where it leads is not known


@dataclass
class State:
    """What is remembered of a request."""

    rows: list[MaskedTranscript]
    joint: JointScorer
    pushed: list[int]  # new tokens of each row that the scorer has seen
    first: bool = field(default=True)


@dataclass(frozen=True)
class MaskedCtcDraft(OfEncoder):
    """Propose what a CTC head is sure of, span by span (SMUD, Okabe & Yamamoto 2025).

    First the whole transcript: the decoder's pass over it tells which tokens it doubts, and these
    are masked beside those whose confidence is below `sure`. Inside a mask the span behind it is
    proposed at every step: the mask ends where its first token is written. Reconstructed from a
    description; there is no budget of tokens in a mask.
    """

    spelling: Callable[[Sequence[int]], list[int]]  # labels -> tokens
    spelled: Labels
    end: int
    sure: float
    weight: float
    most: int

    def begin(self, context: Any) -> State:
        """Read the transcripts. Raises ValueError for several sounds in a row."""
        heard = self.heard(context)
        scorers: list[PrefixScorer | None] = [None] * context.batch
        rows = [MaskedTranscript([], []) for _ in range(context.batch)]
        if heard is not None:
            paths = greedy(heard.log_probs, heard.seen, heard.blank)
            for row, path in enumerate(paths):
                distribution = heard.log_probs[row, heard.seen[row]]
                scorers[row] = PrefixScorer(distribution, heard.blank)
                rows[row] = self._transcript(distribution, path, context.request.room)
        joint = JointScorer(scorers, self.spelled, self.end, self.weight, self.most)
        return State(rows, joint, [0] * context.batch)

    def _transcript(self, distribution: Tensor, path: list[Run], room: int) -> MaskedTranscript:
        labels = [run.label for run in path]
        tokens = self.spelling(labels)
        each = confidences(distribution, path).tolist()
        sure = token_confidences([self.spelled(token) for token in tokens], labels, each)
        masked = [one < self.sure for one in sure]
        return MaskedTranscript([*tokens, self.end][:room], [*masked, False][:room])

    def propose(self, context: Any, state: State) -> Draft:
        spans = []
        for row, new in enumerate(context.emitted()):
            for token in new[state.pushed[row] :]:
                state.joint.push(row, token)
            state.pushed[row] = len(new)
            spans.append([] if context.finished[row] else state.rows[row].known(state.first))
        width, device = max(map(len, spans)), context.device
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in spans], device=device)
        mask = torch.tensor(
            [[at < len(row) for at in range(width)] for row in spans], device=device
        )
        shape = (len(spans), width)
        draft = Draft.chain(tokens.long().view(shape), Kind.DET, mask=mask.bool().view(shape))
        return replace(draft, extras=state.joint)

    def observe(
        self, context: Any, state: State, draft: Draft, scores: Scores, kept: Round
    ) -> State:
        own = categorical(scores.distribution).scores.argmax(-1).tolist() if state.first else None
        for row, transcript in enumerate(state.rows):
            if own is not None and draft.nodes:
                for at, token in enumerate(transcript.tokens):
                    transcript.masked[at] |= own[row][at] != token
            transcript.learn(kept.accepted[row])
        state.first = False
        return state


def token_confidences(
    spelled: Sequence[Sequence[int]], labels: Sequence[int], each: Sequence[float]
) -> list[float]:
    """How sure every token is: as its least sure label.

    As the least sure of all where tokens and labels do not line up.
    """
    joined = [label for token in spelled for label in token]
    start = next(
        (at for at in range(len(labels) + 1) if [*labels[at : at + len(joined)]] == joined), None
    )
    if start is None:
        return [min(each, default=1.0)] * len(spelled)
    found = []
    for token in spelled:
        found.append(min(each[start : start + len(token)], default=1.0))
        start += len(token)
    return found
