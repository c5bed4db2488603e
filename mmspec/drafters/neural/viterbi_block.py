"""Blocks of tokens out of multi-token heads: the best path through their candidates (Codec-MTP)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mmspec.codes.bigrams import Bigrams
from mmspec.codes.trellis import best_path
from mmspec.draft import Draft, Drafter, Kind, Round, Scores
from mmspec.drafters.chosen_kind import ChoosesKind
from mmspec.drafters.growth import News
from mmspec.drafters.lengths.length import useful
from mmspec.drafters.neural.multi_token import MultiTokenDraft
from mmspec.drafters.neural.small_model import OfModel, committed, draft_distribution
from mmspec.errors import check_number
from mmspec.models.heads.multi_token import MultiTokenHeads
from mmspec.recipe import LINEAR, Kit
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class BlockShape:
    """Blocks of as many tokens as the option `n` says."""

    words: str = "block of n tokens"
    walk: ClassVar[str] = LINEAR


@dataclass(frozen=True, eq=False)
class ViterbiBlock(ChoosesKind, OfModel):
    """Drafts `n` - 1 tokens behind the newest one: the best path through what the heads say.

    Nguyen et al. 2025. Candidates are the `k` best of each head; `lam` weighs the transitions
    between them, counted in the training text and kept beside the heads. Scores carry the target's
    own noise of their places, so that a block is sampled as it is maximised, and one of one token
    is plain decoding. Raises ValueError at construction for knobs without a meaning, more places
    than heads, and heads without counts (`lam`=0 needs none).
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
                f"n={self.n} tokens a block need {self.n - 1} heads behind the target's own, but "
                f"there are {config.num_heads}; give n={config.num_heads + 1} or less"
            )
        if self.lam and not config.num_bigrams:
            raise ValueError(
                f"lam={self.lam} weighs transitions between tokens, and these heads carry no "
                "counts of them; give lam=0, or heads with bigrams (mmspec.codes.bigrams)"
            )

    def begin(self, context: Context) -> _Blocks:
        assert isinstance(self.model.heads, MultiTokenHeads)
        table = self.model.heads.bigrams if self.lam else None
        bigrams = None if table is None else Bigrams(table, context.vocabulary)
        return _Blocks(self.model.begin(context), bigrams)

    def propose(self, context: Context, state: _Blocks) -> Draft:
        count = min(self.n - 1, useful(context))
        if not count:
            return context.nothing()
        places = torch.arange(count, device=context.device)[None]
        logits = self.model.ahead(context, state.model, count)
        distribution, kind = (
            draft_distribution(context, logits, committed(context), places),
            self.kinds[0],
        )
        scores = distribution.scores
        if kind is Kind.RACE:
            scores = distribution.perturbed(context.noise.shared(context.position() + places))
        last = torch.tensor([row[-1] for row in context.history], device=context.device)
        return Draft.chain(best_path(scores, last, state.bigrams, self.k, self.lam), kind)

    def observe(
        self, context: Context, state: _Blocks, draft: Draft, scores: Scores, kept: Round
    ) -> _Blocks:
        news = News(draft, scores, kept, ((),) * draft.batch, 0, ())
        return replace(state, model=self.model.keep(context, state.model, news))


@dataclass(frozen=True)
class _Blocks:
    """What is remembered of a request."""

    model: Any
    bigrams: Bigrams | None


def viterbi_block(kit: Kit) -> Drafter:
    """Multi-token heads, and the best path through what they say."""
    if not isinstance(kit.shape, BlockShape):
        raise ValueError("a block has as many tokens as n= says; drop length= and tree=")
    assert isinstance(kit.drafter, MultiTokenDraft)
    return ViterbiBlock(kit.drafter, *(kit.options[name] for name in ("n", "k", "lam")))
