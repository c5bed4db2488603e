"""A causal target small enough to enumerate, with the loop's protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from mmspec.bench.frequency import chi_square
from mmspec.codes.grid import Grid
from mmspec.decode import Parts, decode
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.noise import KeyedNoise
from mmspec.distributions.sampling import Sampling
from mmspec.draft import Draft, Drafter, Round, Scores, Verifier
from mmspec.targets.stop import Stop
from mmspec.targets.tokens.context import Context, Request

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TableTarget:
    """Every prefix of up to `room` new tokens has its own distribution, drawn from a seed."""

    size: int = 3
    room: int = 5
    seed: int = 0
    scale: float = 1.0
    forgetful: bool = (
        False  # one distribution for every prefix; embeddings are read as their argmax
    )
    grid: Grid | None = None  # says nothing else than what it allows

    @cached_property
    def logits(self) -> Tensor:  # (R + 1, V), prefixes by length and then by code; the last is idle
        rows = sum(self.size**length for length in range(self.room))
        random = torch.Generator().manual_seed(self.seed)
        table = torch.randn(rows + 1, self.size, generator=random) * self.scale
        if self.forgetful:
            table = table[:1].expand(rows + 1, -1).clone()
        for length in range(self.room):
            forced = None if self.grid is None else self.grid.forced_token(length)
            start = sum(self.size**shorter for shorter in range(length))
            if forced is not None:
                table[start : start + self.size**length, :forced] = -torch.inf
                table[start : start + self.size**length, forced + 1 :] = -torch.inf
        return table.log_softmax(-1)

    def row(self, length: Tensor, code: Tensor) -> Tensor:
        """The table row of prefixes; one row stands for all that are too long."""
        starts = torch.tensor([sum(self.size**d for d in range(n)) for n in range(self.room + 1)])
        row = starts[length.clamp_max(self.room)] + code
        return torch.where(length < self.room, row, len(self.logits) - 1)

    def joint(self) -> Tensor:  # (V ** room,)
        """The distribution of all new tokens, as one code."""
        mass = torch.ones(1, dtype=torch.float64)
        for length in range(self.room):
            codes = torch.arange(self.size**length)
            distribution = (
                self.logits[self.row(torch.full_like(codes, length), codes)].double().exp()
            )
            mass = (mass[:, None] * distribution).flatten()
        return mass

    def prefill(self, request: Request) -> Context:
        batch = request.inputs["input_ids"].shape[0]
        distribution = self.distribution(request, self.logits[0].expand(batch, 1, -1))
        context = Context(
            request=request,
            history=tuple([0] for _ in range(batch)),
            prompt=(1,) * batch,
            padding=(0,) * batch,
            vocabulary=self.size,
            memory=cast(Any, None),  # nothing is remembered: the history says it all
            noise=request.noise,
            finished=(False,) * batch,
        )
        return replace(context, scores=Scores(distribution, context.position()))

    def score(self, context: Context, draft: Draft) -> Scores:
        codes = [[self.code(row[1:])] for row in context.history]
        code, length = torch.tensor(codes), context.position() - 1
        depth = torch.cat((torch.zeros_like(length), draft.relative_positions() + 1), 1)
        embeds = None if draft.node_inputs is None else draft.node_inputs.embeds
        tokens = draft.tokens if embeds is None else embeds.argmax(-1)
        for node in range(draft.nodes):
            parent = draft.parents[:, node : node + 1] + 1
            gap = depth[:, node + 1 : node + 2] - depth.gather(1, parent)  # missing tokens count 0
            below = code.gather(1, parent) * self.size**gap + tokens[:, node : node + 1]
            code = torch.cat((code, below % self.size**self.room), 1)
        logits = self.logits[self.row(length + depth, code)]
        return Scores(self.distribution(context.request, logits), length + 1 + depth)

    def keep(self, context: Context, draft: Draft, round_: Round) -> Context:
        for history, tokens in zip(context.history, round_.tokens, strict=True):
            history.extend(tokens)
        return replace(context, scores=None, finished=round_.finished)

    def code(self, tokens: list[int]) -> int:
        code = 0
        for token in tokens:
            code = code * self.size + token
        return code

    def distribution(self, request: Request, logits: Tensor) -> Categorical:
        return request.sampling.distribution(logits)


def sample(
    target: TableTarget,
    drafter: Drafter,
    verifier: Verifier,
    rows: int = 20_000,
    seed: int = 0,
    greedy: bool = False,
) -> tuple[list[list[int]], list[Round]]:
    """New tokens per row, and the rounds of the run."""
    request = Request(
        {"input_ids": torch.zeros(rows, 1, dtype=torch.int64)},
        Sampling(do_sample=not greedy),
        KeyedNoise.from_seed(seed, rows, CPU),
        target.room,
    )
    rounds = list(decode(Parts(target, drafter, verifier, Stop(target.room)), request))
    assert all(round_.fallback is None for round_ in rounds)
    tokens: list[list[int]] = [[] for _ in range(rows)]
    for round_ in rounds:
        for row, new in zip(tokens, round_.tokens, strict=True):
            row.extend(new)
    return tokens, rounds


def z_score(
    target: TableTarget, drafter: Drafter, verifier: Verifier, rows: int = 100_000, seed: int = 0
) -> float:
    """Distance of chi-square from its mean, in its own standard deviations."""
    tokens, _ = sample(target, drafter, verifier, rows, seed)
    codes = torch.tensor(tokens) @ target.size ** torch.arange(target.room - 1, -1, -1)
    distribution = target.joint()
    counts = torch.bincount(codes, minlength=len(distribution)).double()
    statistic, cells = chi_square(counts, distribution * rows)
    return (statistic - (cells - 1)) / math.sqrt(2 * (cells - 1))
