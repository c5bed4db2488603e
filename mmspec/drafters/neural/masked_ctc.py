"""Drafting with a CTC transcript whose uncertain spans are masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.codes.ctc import JointScorer, PrefixScorer, Run, confidences, greedy
from mmspec.distributions.categorical import as_categorical
from mmspec.draft import Draft, Kind, Round, Scores
from mmspec.drafters.neural.ctc_draft import EncoderDrafter

Labels = Callable[[int], Sequence[int]]  # token of the target -> CTC labels


@dataclass
class MaskedTranscript:
    """The transcript of one row, its uncertain tokens, and the position reached."""

    tokens: list[int]
    masked: list[bool]
    at: int = 0  # index of the next token
    is_open: bool = False  # whether the text is inside a mask, which ends at `at`
    proposed: int = 0

    def next_span(self, whole: bool) -> list[int]:
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
        """Advance by the accepted tokens; a rejected token becomes a mask, unless one is open."""
        refused = accepted < self.proposed
        if accepted:
            self.at, self.is_open = self.at + accepted, False
        if refused and not self.is_open:
            self.masked[self.at] = True


@dataclass
class MaskedCtcState:
    """The state of a request."""

    rows: list[MaskedTranscript]
    joint: JointScorer
    pushed: list[int]  # new tokens per row already passed to the scorer
    first: bool = field(default=True)


@dataclass(frozen=True)
class MaskedCtcDraft(EncoderDrafter):
    """Propose the certain spans of a CTC transcript, one by one (SMUD, Okabe & Yamamoto 2025).

    First the whole transcript: the decoder's pass over it shows which tokens it disagrees with;
    these are masked together with those of confidence below `sure`. Inside a mask the next span is
    proposed at every step: the mask ends where its first token is accepted. Reconstructed from a
    description; there is no limit on the tokens in a mask.
    """

    spelling: Callable[[Sequence[int]], list[int]]  # labels -> tokens
    spell: Labels
    end: int
    sure: float
    weight: float
    max_candidates: int

    def begin(self, context: Any) -> MaskedCtcState:
        """Read the transcripts. Raises ValueError for several sounds per row."""
        encoder_output = self.encoder_output(context)
        scorers: list[PrefixScorer | None] = [None] * context.batch
        rows = [MaskedTranscript([], []) for _ in range(context.batch)]
        if encoder_output is not None:
            paths = greedy(encoder_output.log_probs, encoder_output.mask, encoder_output.blank)
            for row, path in enumerate(paths):
                distribution = encoder_output.log_probs[row, encoder_output.mask[row]]
                scorers[row] = PrefixScorer(distribution, encoder_output.blank)
                rows[row] = self._transcript(distribution, path, context.request.max_new_tokens)
        joint = JointScorer(scorers, self.spell, self.end, self.weight, self.max_candidates)
        return MaskedCtcState(rows, joint, [0] * context.batch)

    def _transcript(
        self, distribution: Tensor, path: list[Run], max_tokens: int
    ) -> MaskedTranscript:
        labels = [run.label for run in path]
        tokens = self.spelling(labels)
        each = confidences(distribution, path).tolist()
        sure = token_confidences([self.spell(token) for token in tokens], labels, each)
        masked = [one < self.sure for one in sure]
        return MaskedTranscript([*tokens, self.end][:max_tokens], [*masked, False][:max_tokens])

    def propose(self, context: Any, state: MaskedCtcState) -> Draft:
        spans = []
        for row, new in enumerate(context.generated_tokens()):
            for token in new[state.pushed[row] :]:
                state.joint.push(row, token)
            state.pushed[row] = len(new)
            spans.append([] if context.finished[row] else state.rows[row].next_span(state.first))
        width, device = max(map(len, spans)), context.device
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in spans], device=device)
        mask = torch.tensor(
            [[at < len(row) for at in range(width)] for row in spans], device=device
        )
        shape = (len(spans), width)
        draft = Draft.chain(tokens.long().view(shape), Kind.DET, mask=mask.bool().view(shape))
        return replace(draft, extras=state.joint)

    def observe(
        self, context: Any, state: MaskedCtcState, draft: Draft, scores: Scores, round_: Round
    ) -> MaskedCtcState:
        own = (
            as_categorical(scores.distribution).scores.argmax(-1).tolist() if state.first else None
        )
        for row, transcript in enumerate(state.rows):
            if own is not None and draft.nodes:
                for at, token in enumerate(transcript.tokens):
                    transcript.masked[at] |= own[row][at] != token
            transcript.learn(round_.accepted[row])
        state.first = False
        return state


def token_confidences(
    spell: Sequence[Sequence[int]], labels: Sequence[int], each: Sequence[float]
) -> list[float]:
    """The confidence of every token: that of its least certain label.

    Where tokens and labels do not align, the lowest confidence of all.
    """
    joined = [label for token in spell for label in token]
    start = next(
        (at for at in range(len(labels)) if [*labels[at : at + len(joined)]] == joined), None
    )
    if start is None:
        return [min(each, default=1.0)] * len(spell)
    found = []
    for token in spell:
        found.append(min(each[start : start + len(token)], default=1.0))
        start += len(token)
    return found
