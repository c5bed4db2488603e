"""Drafting with the target itself, which reads learned look-ahead tokens (PaSS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Kind, NodeInputs
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    committed_prefix,
    draft_distribution,
    predict_ahead,
)
from mmspec.drafters.neural.shared import SharedBackbone
from mmspec.drafters.neural.small_model import unread_block
from mmspec.drafters.neural.target_heads import HeadKind
from mmspec.models.heads.lookahead_tokens import LookaheadTokens
from mmspec.recipe import STATES
from mmspec.targets.memory import build_block
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True, eq=False)
class LookaheadDraft(DraftModel):
    """Distributions of the next K + 1 tokens from one forward of the target (Monea et al. 2023).

    It reads the newest token and K look-ahead tokens after its own cache, which is not changed:

        target's cache    a b | c [v1 v2 v3]     c newest; scoring overwrites all of [ ]

    The first distribution is the target's own, so the first drafted token is always accepted. A
    round costs two forwards of the target and yields at least two tokens. Raises ValueError at
    construction for tokens of another target, and for one whose cache cannot be shared.
    """

    backbone: Reader  # the target's
    tokens: LookaheadTokens
    shared: SharedBackbone = field(init=False, repr=False)
    sees: ClassVar[str] = STATES
    is_parallel: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_tokens(self.tokens, self.backbone)
        object.__setattr__(self, "shared", SharedBackbone(self.backbone))

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.tokens,)

    @property
    def max_depth_ahead(self) -> int:
        return self.tokens.reach

    def compile_blocks(self, make_graphs: Callable[..., Any]) -> str:
        return self.shared.compile_blocks(make_graphs)

    def begin(self, context: Context) -> _Lookahead:
        new_tokens = context.request.max_new_tokens
        self.shared.draft_reader.prepare_graphs(context.memory, new_tokens)
        return _Lookahead()

    def predict_first(self, context: Context, state: _Lookahead) -> Categorical:
        unread_block(context)  # raises ValueError for rows of different lengths
        draft = lookahead_nodes(self.tokens(context.batch))
        block = build_block(context.pending_tokens(), draft, context.memory.like)
        state.logits, _ = self.shared.draft_reader.read(context.memory, block)
        return draft_distribution(context, state.logits[:, :1], committed_prefix(context))

    def predict(self, context: Context, state: _Lookahead, nodes: DraftNodes) -> Categorical:
        assert state.logits is not None
        return predict_ahead(context, state.logits, nodes)

    def keep(self, context: Context, state: _Lookahead, update: DraftUpdate) -> _Lookahead:
        return _Lookahead()


@dataclass
class _Lookahead:
    """The state of a round."""

    logits: Tensor | None = None  # (B, K + 1, V)

    def join(self, other: _Lookahead) -> None:
        """Append the rows of another request."""
        self.logits = None

    def drop(self, row: int) -> None:
        """Remove a row; the last one takes its place."""
        self.logits = None


def lookahead_nodes(embeds: Tensor) -> Draft:  # (B, K, D)
    """Look-ahead tokens as a chain of draft nodes; their token ids are not read."""
    ids = torch.zeros(embeds.shape[:2], dtype=torch.int64, device=embeds.device)
    return replace(Draft.chain(ids, Kind.DET), node_inputs=NodeInputs(embeds=embeds))


def embedding_width(target: Reader) -> int:
    """Width of a target's input embeddings."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    return int(target.embed(token).shape[-1])


def check_tokens(tokens: Any, target: Reader) -> None:
    """Refuse look-ahead tokens that were not made for this target. Raises ValueError."""
    ours = (embedding_width(target), target.vocabulary)
    theirs = (tokens.config.hidden_size, tokens.config.vocab_size)
    if ours != theirs:
        raise ValueError(
            f"these look-ahead tokens are {theirs[0]} wide, for {theirs[1]} tokens, but "
            f"{type(target.model).__name__} reads {ours[1]} tokens, {ours[0]} wide; train some for "
            "this target with `mmspec train pass-sampling`"
        )


def _width(target: Reader) -> dict[str, Any]:
    return {"hidden_size": embedding_width(target)}


LOOKAHEAD_TOKENS = HeadKind(
    LookaheadTokens, LookaheadDraft, "set of look-ahead tokens", sizes=_width
)
