"""A chain as the loop sees it: what is walked so far, and distributions after any state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from markov_modality.model import MarkovChain
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.draft import Draft, Drafter, Kind, Round, Scores


@dataclass(frozen=True)
class WalkRequest:
    """Where every row begins."""

    start: tuple[int, ...]
    noise: KeyedNoise


@dataclass(frozen=True)
class Walk:
    """The context: the states of every row."""

    rows: tuple[tuple[int, ...], ...]
    noise: KeyedNoise
    finished: tuple[bool, ...]
    scores: ClassVar[None] = None  # no distribution is known without a look into the table
    prefix: ClassVar[None] = None

    @property
    def batch(self) -> int:
        return len(self.rows)

    def num_generated(self, row: int) -> int:
        return len(self.rows[row]) - 1

    def generated_tokens(self) -> list[list[int]]:
        return [list(row[1:]) for row in self.rows]

    def empty_draft(self) -> Draft:
        return Draft.empty(self.batch, self.noise.rows.device)

    def at_round(self, index: int) -> Walk:
        return replace(self, noise=self.noise.at_round(index))

    def last(self) -> Tensor:  # (B, 1)
        """The state of every row."""
        return torch.tensor([[row[-1]] for row in self.rows])

    def position(self) -> Tensor:  # (B, 1)
        """The position of the next state."""
        return torch.tensor([[len(row)] for row in self.rows])


def distribution(chain: MarkovChain, states: Tensor, temperature: float) -> Categorical:  # (...)
    """What follows these states."""
    scores = chain.table.log()[states]
    return Categorical(scores / (temperature or 1.0), hard=temperature == 0)


@dataclass(frozen=True)
class ChainTable:
    """The target: one look into the table a call, whatever the draft."""

    model: MarkovChain
    temperature: float = 1.0
    can_branch: ClassVar[bool] = True

    def prefill(self, request: WalkRequest) -> Walk:
        rows = tuple((state,) for state in request.start)
        return Walk(rows, request.noise, (False,) * len(rows))

    def score(self, context: Walk, draft: Draft) -> Scores:
        position = context.position()
        position = torch.cat((position, position + 1 + draft.depths()), 1)
        states = torch.cat((context.last(), draft.tokens), 1)
        return Scores(distribution(self.model, states, self.temperature), position)

    def keep(self, context: Walk, draft: Draft, round_: Round) -> Walk:
        rows = zip(context.rows, round_.tokens, strict=True)
        walked = tuple((*row, *new) for row, new in rows)
        return replace(context, rows=walked, finished=round_.finished)


@dataclass(frozen=True)
class AnotherChain(Drafter):
    """Walks ahead with the table of a draft chain, under the target's own noise."""

    chain: MarkovChain
    temperature: float
    steps: int
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.RACE,)

    def begin(self, context: Walk) -> None:
        return None

    def propose(self, context: Walk, state: None) -> Draft:
        tokens, last, position = list[Tensor](), context.last(), context.position()
        for step in range(self.steps):
            keys = context.noise.shared_keys(position + step)
            last = distribution(self.chain, last, self.temperature).sample(keys)
            tokens.append(last)
        return Draft.chain(torch.cat(tokens, 1), Kind.RACE)

    def observe(
        self, context: Walk, state: None, draft: Draft, scores: Scores, round_: Round
    ) -> None:
        return None
