"""Further outputs of a request: the scores of every token, and the final cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmspec.distributions.categorical import Categorical
from mmspec.draft import Draft, Round, Scores
from mmspec.targets.memory import RowMemories, build_block
from mmspec.targets.readers.backbone import Backbone
from mmspec.targets.readers.hooks import wanted_layers
from mmspec.targets.tokens.causal import CausalTarget
from mmspec.targets.tokens.context import Context, Request, prefix_of
from mmspec.targets.tokens.late import DeferredPrefill
from mmspec.targets.tokens.turns import KEPT, KeptFeatures, write_cache

Rows = Sequence[Sequence[int]]
Steps = tuple[Tensor, ...]  # (B, V) per new token


@dataclass(frozen=True)
class RequestOutcome:
    """Further outputs of a request; None = not requested."""

    cache: Cache | None = None
    logits: Steps | None = None  # of the model
    scores: Steps | None = None  # after processors and warpers
    sequences_scores: Tensor | None = None  # (B * R,) of beams


@dataclass(eq=False)
class OutcomeRecorder:
    """A target that stores the scores of verified tokens and the final context.

    The scores that verified a token are those that `generate()` computes for it, up to the rounding
    of a forward over several tokens instead of one. The padding of rows that have ended is read as
    well, as in `generate()`; that takes one more forward if a row ended early.
    """

    target: CausalTarget
    keeps_scores: bool
    start: int = field(default=0, init=False)  # slots of the prompt
    context: Context | None = field(default=None, init=False)
    last: Scores | None = field(default=None, init=False)
    logits: list[list[Tensor]] = field(default_factory=list, init=False)  # (n, V), row by row
    scores: list[list[Tensor]] = field(default_factory=list, init=False)
    states: dict[str, list[list[Tensor]]] = field(default_factory=dict, init=False)  # (n, W)

    def __post_init__(self) -> None:
        if self.keeps_scores:
            own = self.target
            later = {"logits"} if own.joins_prefill else set()  # the prompt is scored with a draft
            required_features, deferred_features = (
                own.required_features | {"logits"},
                own.deferred_features | later,
            )
            self.target = replace(
                own, required_features=required_features, deferred_features=deferred_features
            )

    def prefill(self, request: Request) -> Context:
        context = self.target.prefill(request)
        memory: Any = context.memory
        if isinstance(memory, DeferredPrefill):  # the features need the prompt to be read
            context = replace(context, memory=memory.run())
        self.context = context
        self.start = context.memory.lengths[0] + (context.scores is None)
        self.last = context.scores
        self.logits = [[] for _ in context.history]
        self.scores = [[] for _ in context.history]
        names = keepable_features(self.target.required_features - {"logits"})
        is_read = all(name in context.shared for name in (*names, "embeds"))
        self.states = {name: [[] for _ in context.history] for name in names if is_read}
        return context

    def score(self, context: Context, draft: Draft) -> Scores:
        self.last = self.target.score(context, draft)
        return self.last

    def keep(self, context: Context, draft: Draft, round_: Round) -> Context:
        if self.keeps_scores:
            self._record(round_)
        self._record_states(round_)
        # the last token of a sequence is never read: if it was drafted, it is rolled back
        pairs = zip(round_.path, round_.tokens, strict=True)
        path = tuple(nodes[: max(len(tokens) - 1, 0)] for nodes, tokens in pairs)
        self.context = self.target.keep(context, draft, replace(round_, path=path))
        return self.context

    def finish(self, tokens: Rows, cache: Cache | None, returns_cache: bool) -> RequestOutcome:
        """Read up to the last but one of the new `tokens`, padded to rows of equal length.

        With `returned` the slots are appended to `cache`, or to a new one for None.
        """
        context = self.context
        assert context is not None
        missing_prompt = [max(self.start - kept, 0) for kept in context.memory.lengths]
        if any(missing_prompt):  # the last token of the prompt is written, but still pending
            context.memory.advance(missing_prompt)
        count, read = len(tokens[0]), [kept - self.start for kept in context.memory.lengths]
        ended = [len(row) for row in context.generated_tokens()]
        missing = [row[done : count - 1] for row, done in zip(tokens, read, strict=True)]
        extra: list[Tensor] = []
        needed = returns_cache or (self.keeps_scores and min(ended) < count)
        if needed and any(missing):
            extra = self._read(context, missing)
        filled = self._write_cache(context, cache, count) if returns_cache else None
        if filled is not None:
            self._keep_features(context, filled, tokens)
        if not self.keeps_scores:
            return RequestOutcome(filled)
        for row, own in enumerate(extra):  # the padding after a row's end
            self.logits[row].append(own[max(ended[row] - read[row] - 1, 0) :])
        logits = torch.stack([torch.cat(row) for row in self.logits])[:, :count]
        if min(ended) < count:
            distribution = self._distribution(context, tokens, logits, min(ended))
            for row, end in enumerate(ended):
                self.scores[row].append(distribution[row, end - min(ended) :])
        scores = torch.stack([torch.cat(row) for row in self.scores])
        return RequestOutcome(filled, logits.float().unbind(1), scores.unbind(1))

    def _record_states(self, round_: Round) -> None:
        """Store the states of the tokens before each accepted one."""
        if round_.is_unverified:  # tokens that the target has not read
            self.states = {}
        if not round_.calls or self.last is None:
            return
        for name, rows in self.states.items():
            states = self.last.features[name]
            for row, own in enumerate(rows):
                places = [0, *(node + 1 for node in round_.path[row])]
                own.append(states[row, places[: len(round_.tokens[row])]])

    def _keep_features(self, context: Context, cache: Cache, tokens: Rows) -> None:
        """Keep what the drafter needs of all tokens with the cache; states of padding are zero."""
        setattr(cache, KEPT, None)
        if not self.states:
            return
        shared, count, states = context.shared, len(tokens[0]) - 1, {}
        for name, rows in self.states.items():
            new = shared[name].new_zeros(len(rows), count, shared[name].shape[-1])
            for row, parts in enumerate(rows):
                if parts:
                    own = torch.cat(parts)[:count]
                    new[row, : len(own)] = own
            states[name] = torch.cat((shared[name], new), 1)
        ids = torch.tensor([row[:count] for row in tokens], device=context.device)
        embeds = shared["embeds"]
        if count:
            embeds = torch.cat((embeds, self.target.backbone.embed(ids).to(embeds)), 1)
        positions = shared.get("positions")
        if positions is not None:
            steps = torch.arange(1, count + 1, device=positions.device)
            positions = positions.expand(*positions.shape[:-2], len(tokens), -1)
            positions = torch.cat((positions, positions[..., -1:] + steps), -1)
        setattr(cache, KEPT, KeptFeatures(states, embeds, positions))

    def _record(self, round_: Round) -> None:
        """Store the scores of each accepted token: those of the position before it."""
        assert self.last is not None
        distribution, logits = (
            cast(Categorical, self.last.distribution),
            self.last.features["logits"],
        )
        for row, (nodes, tokens) in enumerate(zip(round_.path, round_.tokens, strict=True)):
            places = [0, *(node + 1 for node in nodes)][: len(tokens)]
            self.logits[row].append(logits[row, places])
            self.scores[row].append(distribution.scores[row, places])

    def _distribution(self, context: Context, tokens: Rows, logits: Tensor, first: int) -> Tensor:
        """Scores (B, n, V) from token `first` on; processors are given the padding before each."""
        known = [row[:first] for row in tokens]
        paths = [
            [row[first : first + place] for place in range(logits.shape[1] - first)]
            for row in tokens
        ]
        before = replace(prefix_of(context, lambda: paths), generated=known)
        scores: Tensor = context.sampling.distribution(logits[:, first:], before).scores
        return scores

    def _read(self, context: Context, missing: Rows) -> list[Tensor]:  # (n, V) each
        """Read the missing tokens of every row; return the logits after each."""
        memory, backbone = context.memory, self.target.backbone
        pieces = memory.rows if isinstance(memory, RowMemories) else [memory]
        size = len(missing) // len(pieces)  # rows that are read at once
        found: list[Tensor] = []
        for index, piece in enumerate(pieces):
            rows = missing[index * size : (index + 1) * size]
            layout = build_block([row or [0] for row in rows], None, piece.like)
            logits, _ = backbone.read(piece, replace(layout, waiting=1))  # of every token
            piece.advance([len(row) for row in rows])
            found += [own[len(own) - len(row) :] for own, row in zip(logits, rows, strict=True)]
        return found

    def _write_cache(self, context: Context, cache: Cache | None, count: int) -> Cache:
        assert isinstance(self.target.backbone, Backbone)
        memory = context.memory
        rows = memory.rows if isinstance(memory, RowMemories) else [memory]
        slots, config = [row.cache for row in rows], self.target.backbone.cache_config
        return write_cache(slots, config, cache, self.start + count - 1)


def keepable_features(names: Iterable[str]) -> list[str]:
    """The names, if all of them are hidden states of every token; else none."""
    wanted = sorted(names)
    is_kept = all(one == "hidden" or one in wanted_layers({one}) for one in wanted)
    return wanted if is_kept else []
