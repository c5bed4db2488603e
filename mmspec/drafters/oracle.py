"""Drafters for measurements and tests: one that knows the output, and a random one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmspec.distributions.noise import KeyedNoise, Lane
from mmspec.draft import Draft, Drafter, Kind
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.targets.tokens.context import Context
from mmspec.trees import Tree, limit_depth


class TreeDrafter(Drafter):
    """Propose on a fixed tree; an int is the length of a chain."""

    kinds: tuple[Kind, ...] = (Kind.DET,)

    def __init__(self, tree: Tree | int) -> None:
        self.tree = Tree.chain(tree) if isinstance(tree, int) else tree

    @property
    def uses_trees(self) -> bool:
        return not self.tree.is_chain


class Oracle(TreeDrafter):
    """Replay known outputs, each token replaced by a wrong one with probability `corruption`.

    `answers[b]` are the new tokens of row b. `tree` is a topology or the length of a chain. In a
    tree the right token gets a rank drawn from a geometric distribution (the next rank with
    probability `spread`, up to the last sibling), so that paths other than the first are taken;
    `spread=0` always ranks it first. The draw at a position depends on (seed, row, position) only.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        corruption: float = 0.0,
        tree: Tree | int = 5,
        seed: int = 0,
        spread: float = 0.5,
    ) -> None:
        for name, value in (("corruption", corruption), ("spread", spread)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} is not a probability; give one within [0, 1]")
        self.answers = [list(row) for row in answers]
        self.corruption = corruption
        super().__init__(tree)
        self.seed = seed
        self.spread = spread

    def begin(self, context: Context) -> list[list[TokenHint]]:
        if len(self.answers) != context.batch:
            raise ValueError(
                f"there are answers for {len(self.answers)} rows, but the batch has "
                f"{context.batch}; give one answer per row"
            )
        longest = max(map(len, self.answers), default=0)
        noise = KeyedNoise.from_seed(self.seed, context.batch, torch.device("cpu"))
        places = torch.arange(longest).expand(context.batch, -1)
        chances = noise.shared_keys(places).uniform(3).tolist()
        size = context.vocabulary
        return [
            [
                TokenHint(
                    token, wrong < self.corruption, _rank(rank, self.spread), int(gap * size), size
                )
                for token, (wrong, rank, gap) in zip(answer, row, strict=False)
            ]
            for answer, row in zip(self.answers, chances, strict=True)
        ]

    def propose(self, context: Context, state: list[list[TokenHint]]) -> Draft:
        tree = limit_depth(self.tree, max_useful_length(context))
        if not tree.nodes:
            return Draft.empty(context.batch, context.device)
        rows = [
            _tokens(tree, state[row][context.num_generated(row) :], text[-1])
            for row, text in enumerate(context.history)
        ]
        return Draft.from_tree(tree, torch.tensor(rows, device=context.device), Kind.DET)


@dataclass(frozen=True)
class TokenHint:
    """What is proposed at one position."""

    token: int
    is_wrong: bool
    rank: int  # the sibling that gets the right token
    gap: int  # distance of the wrong tokens from the right one
    size: int  # of the vocabulary

    def predict(self, rank: int, siblings: int) -> int:
        """The token of one sibling; siblings differ as long as the vocabulary is large enough."""
        if not self.is_wrong and rank == min(self.rank, siblings - 1):
            return self.token
        return (self.token + 1 + (self.gap + rank) % (self.size - 1)) % self.size


class RandomDrafter(TreeDrafter):
    """Propose random tokens, for tests that the draft does not change the output.

    `tree` is a topology or the length of a chain; `vocabulary` defaults to the target's.
    """

    def __init__(self, vocabulary: int | None = None, tree: Tree | int = 5, seed: int = 0) -> None:
        super().__init__(tree)
        self.vocabulary = vocabulary
        self.seed = seed

    def begin(self, context: Context) -> tuple[KeyedNoise, int]:
        noise = KeyedNoise.from_seed(self.seed, context.batch, context.device)
        return noise, context.vocabulary if self.vocabulary is None else self.vocabulary

    def propose(self, context: Context, state: tuple[KeyedNoise, int]) -> Draft:
        noise, vocabulary = state
        tree = limit_depth(self.tree, max_useful_length(context))
        if not tree.nodes:
            return Draft.empty(context.batch, context.device)
        nodes = torch.arange(tree.nodes, device=context.device)
        keys = noise.at_round(context.noise.round).fresh_keys(Lane.DRAFT, nodes)
        return Draft.from_tree(tree, (keys.uniform() * vocabulary).long(), Kind.DET)


def _rank(chance: float, spread: float) -> int:
    """Number of successes in a row with probability `spread` each: P(rank >= r) = spread ** r."""
    rank = 0
    while chance < spread ** (rank + 1) and rank < 64:
        rank += 1
    return rank


def _tokens(tree: Tree, hints: Sequence[TokenHint], filling: int) -> list[int]:
    """Tokens of a tree whose right path follows `hints`; other parents get the same children."""
    tokens = [filling] * tree.nodes
    for level, hint in zip(tree.levels, hints, strict=False):
        for node in level:
            siblings = tree.children[tree.parents[node] + 1]
            tokens[node] = hint.predict(siblings.index(node), len(siblings))
    return tokens
