"""Blocks of tokens from multi-token heads: the best path through their candidates (Codec-MTP)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mmspec.codes.bigrams import Bigrams, best_path
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.draft_model import (
    DraftUpdate,
    ModelDrafter,
    MultiKindDrafter,
    committed_prefix,
    draft_distribution,
)
from mmspec.drafters.lengths.length import max_useful_length
from mmspec.drafters.neural.multi_token import MultiTokenDraft
from mmspec.errors import check_number
from mmspec.models.heads.multi_token import MultiTokenHeads
from mmspec.recipe import LINEAR, Kit
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class BlockShape:
    """Blocks of `n` tokens, where `n` is an option."""

    description: str = "block of n tokens"
    walk: ClassVar[str] = LINEAR


@dataclass(frozen=True, eq=False)
class ViterbiBlock(MultiKindDrafter, ModelDrafter):
    """Drafts `n` - 1 tokens after the newest one: the best path through the heads' candidates.

    Nguyen et al. 2025. Candidates are the `k` best of each head; `lam` weighs the transitions
    between them, counted in the training text and stored with the heads. Scores include the
    target's noise of their positions, so that maximisation samples a block, and one of one token is
    plain decoding. Raises ValueError at construction for invalid options, more positions than
    heads, and heads without counts (`lam`=0 needs none).
    """

    model: MultiTokenDraft
    n: int = 4
    k: int = 8
    lam: float = 1.0
    kind: Kind | None = None
    choices: ClassVar[tuple[Kind, ...]] = (Kind.RACE, Kind.DET)

    def __post_init__(self) -> None:
        check_number("n", self.n, 1, whole=True, example=4)
        check_number("k", self.k, 1, whole=True, example=8)
        check_number("lam", self.lam, 0, example=1.0)
        config = self.model.heads.config
        if self.n - 1 > config.num_heads:
            raise ValueError(
                f"n={self.n} tokens a block need {self.n - 1} heads after the target's own, but "
                f"there are {config.num_heads}; give n={config.num_heads + 1} or less"
            )
        if self.lam and not config.num_bigrams:
            raise ValueError(
                f"lam={self.lam} weighs transitions between tokens, and these heads carry no "
                "counts of them; give lam=0, or heads with bigrams (mmspec.codes.bigrams)"
            )

    def begin(self, context: Context) -> _BlockState:
        assert isinstance(self.model.heads, MultiTokenHeads)
        table = self.model.heads.bigrams if self.lam else None
        bigrams = None if table is None else Bigrams(table, context.vocabulary)
        return _BlockState(self.model.begin(context), bigrams)

    def propose(self, context: Context, state: _BlockState) -> Draft:
        count = min(self.n - 1, max_useful_length(context))
        if not count:
            return context.empty_draft()
        places = torch.arange(count, device=context.device)[None]
        logits = self.model.predict_ahead(context, state.model, count)
        distribution, kind = (
            draft_distribution(context, logits, committed_prefix(context), places),
            self.kinds[0],
        )
        scores = distribution.scores
        if kind is Kind.RACE:
            scores = distribution.perturb(context.noise.shared_keys(context.position() + places))
        last = torch.tensor([row[-1] for row in context.history], device=context.device)
        return Draft.chain(best_path(scores, last, state.bigrams, self.k, self.lam), kind)

    def observe(
        self, context: Context, state: _BlockState, draft: Draft, scores: Scores, round_: Round
    ) -> _BlockState:
        news = DraftUpdate(draft, scores, round_, ((),) * draft.batch, 0, ())
        return replace(state, model=self.model.keep(context, state.model, news))


@dataclass(frozen=True)
class _BlockState:
    """The state of a request."""

    model: Any
    bigrams: Bigrams | None


def viterbi_block(kit: Kit) -> Drafter:
    """Multi-token heads, and the best path through their candidates."""
    if not isinstance(kit.shape, BlockShape):
        raise ValueError("the option n= sets the tokens of a block; do not give length= or tree=")
    assert isinstance(kit.drafter, MultiTokenDraft)
    return ViterbiBlock(kit.drafter, *(kit.options[name] for name in ("n", "k", "lam")))
