"""What a request may ask for beside its tokens: scores of every token, and the cache at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Round, Scores
from mmspec.targets.memory import RowMemories, block
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request
from mmspec.targets.tokens.late import Unread
from mmspec.targets.tokens.turns import release

Rows = Sequence[Sequence[int]]
Steps = tuple[Tensor, ...]  # (B, V) per new token


@dataclass(frozen=True)
class Ending:
    """What is left of a request; None where nobody asked."""

    cache: Cache | None = None
    logits: Steps | None = None  # as the model gave them
    scores: Steps | None = None  # as processors and warpers left them


@dataclass(eq=False)
class OutcomeRecorder:
    """A target that remembers the scores of verified tokens, and where the request ended.

    The scores that verified a token are the very ones that `generate()` computes for it, up to the
    rounding of a forward over several tokens instead of one. Rows that have ended are read on over
    their padding, as `generate()` does; that takes one more forward where any row ended early.
    """

    target: CausalTarget
    keeps_scores: bool
    start: int = field(default=0, init=False)  # slots of the prompt
    context: Context | None = field(default=None, init=False)
    last: Scores | None = field(default=None, init=False)
    logits: list[list[Tensor]] = field(default_factory=list, init=False)  # (n, V), row by row
    scores: list[list[Tensor]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.keeps_scores:
            own = self.target
            later = {"logits"} if own.at_once else set()  # those of the prompt come with a draft
            wants, awaits = own.wants | {"logits"}, own.awaits | later
            self.target = replace(own, wants=wants, awaits=awaits)

    def prefill(self, request: Request) -> Context:
        context = self.target.prefill(request)
        memory: Any = context.memory
        if isinstance(memory, Unread):  # what is wanted is there once the prompt is read
            context = replace(context, memory=memory.opened())
        self.context = context
        self.start = context.memory.kept[0] + (context.scores is None)
        self.last = context.scores
        self.logits = [[] for _ in context.history]
        self.scores = [[] for _ in context.history]
        return context

    def score(self, context: Context, draft: Draft) -> Scores:
        self.last = self.target.score(context, draft)
        return self.last

    def keep(self, context: Context, draft: Draft, kept: Round) -> Context:
        if self.keeps_scores:
            self._note(kept)
        # the last token of a sequence is never read: where it is a drafted one, it is forgotten
        pairs = zip(kept.path, kept.tokens, strict=True)
        path = tuple(nodes[: max(len(tokens) - 1, 0)] for nodes, tokens in pairs)
        self.context = self.target.keep(context, draft, replace(kept, path=path))
        return self.context

    def finish(self, tokens: Rows, cache: Cache | None, returned: bool) -> Ending:
        """Read on to the last but one of `tokens`, new ones with padding, rows of equal length.

        With `returned` the slots are written behind what `cache` holds, or into a new one for None.
        """
        context = self.context
        assert context is not None
        behind_it = [max(self.start - kept, 0) for kept in context.memory.kept]
        if any(behind_it):  # the last slot of the prompt is written, and waited for a draft
            context.memory.advance(behind_it)
        count, read = len(tokens[0]), [kept - self.start for kept in context.memory.kept]
        ended = [len(row) for row in context.emitted()]
        missing = [row[done : count - 1] for row, done in zip(tokens, read, strict=True)]
        behind: list[Tensor] = []
        needed = returned or (self.keeps_scores and min(ended) < count)
        if needed and any(missing):
            behind = self._read(context, missing)
        filled = self._released(context, cache, count) if returned else None
        if not self.keeps_scores:
            return Ending(filled)
        for row, own in enumerate(behind):  # what lies behind a row's end, in its padding
            self.logits[row].append(own[max(ended[row] - read[row] - 1, 0) :])
        logits = torch.stack([torch.cat(row) for row in self.logits])[:, :count]
        if min(ended) < count:
            distribution = self._distribution(context, tokens, logits, min(ended))
            for row, end in enumerate(ended):
                self.scores[row].append(distribution[row, end - min(ended) :])
        scores = torch.stack([torch.cat(row) for row in self.scores])
        return Ending(filled, logits.float().unbind(1), scores.unbind(1))

    def _note(self, kept: Round) -> None:
        """The scores of each token just kept: those of the place before it."""
        assert self.last is not None
        distribution, logits = (
            cast(Categorical, self.last.distribution),
            self.last.features["logits"],
        )
        for row, (nodes, tokens) in enumerate(zip(kept.path, kept.tokens, strict=True)):
            places = [0, *(node + 1 for node in nodes)][: len(tokens)]
            self.logits[row].append(logits[row, places])
            self.scores[row].append(distribution.scores[row, places])

    def _distribution(self, context: Context, tokens: Rows, logits: Tensor, first: int) -> Tensor:
        """Scores (B, n, V) from token `first` on; processors see the padding before each."""
        ids = context.request.inputs.get("input_ids")
        given = [[]] * context.batch if ids is None else ids.tolist()

        def before(row: int, place: int) -> Tensor:
            shown = [*given[row], *tokens[row][: first + place]]
            return torch.tensor(shown, dtype=torch.int64, device=logits.device)

        scores: Tensor = context.sampling.distribution(logits[:, first:], before).scores
        return scores

    def _read(self, context: Context, missing: Rows) -> list[Tensor]:  # (n, V) each
        """Read what every row misses; the logits behind each of its tokens."""
        memory, backbone = context.memory, self.target.backbone
        pieces = memory.rows if isinstance(memory, RowMemories) else [memory]
        size = len(missing) // len(pieces)  # rows that are read at once
        found: list[Tensor] = []
        for index, piece in enumerate(pieces):
            rows = missing[index * size : (index + 1) * size]
            layout = block([row or [0] for row in rows], None, piece.like)
            logits, _ = backbone.read(piece, replace(layout, waiting=1))  # of every token
            piece.advance([len(row) for row in rows])
            found += [own[len(own) - len(row) :] for own, row in zip(logits, rows, strict=True)]
        return found

    def _released(self, context: Context, cache: Cache | None, count: int) -> Cache:
        assert isinstance(self.target.backbone, Backbone)
        memory = context.memory
        rows = memory.rows if isinstance(memory, RowMemories) else [memory]
        slots, config = [row.cache for row in rows], self.target.backbone.cache_config
        return release(slots, config, cache, self.start + count - 1)
