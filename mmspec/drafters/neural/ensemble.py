"""Several views of one draft model speak as one: distributions are mixed, and the mixture is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.compressors.average_pool import AveragePool
from mmspec.distributions.categorical import Categorical
from mmspec.distributions.sampling import Prefix
from mmspec.draft import Drafter, Verifier, categorical
from mmspec.drafters.growth import Chain, DraftModel, News, Nodes
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.neural.sight import (
    Nothing,
    Pixels,
    Placeholders,
    Sight,
    compressed_pixels,
)
from mmspec.drafters.neural.small_model import (
    SMALL_MODEL,
    committed,
    draft_distribution,
    grown,
    waiting_block,
)
from mmspec.drafters.neural.weighting import Agreement, Evidence, FixedWeights, Weighting
from mmspec.recipe import Kit, Recipe
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, RowMemories
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Ensemble(DraftModel):
    """The distribution q = sum_m w_m q_m over the `sights` of a draft model (IbED, Lee et al. 2024; TABED).

    All views read the same draft, as one batch of M x B rows, so that a level of the draft is one
    forward; only their prompts are read one by one. Probabilities are mixed, not logits, and the
    mixture is recorded, so this is exact with every lossless verifier. Greedy drafting takes the
    best token of the mixture of softmax distributions. Weights belong to rows.
    """

    backbone: Reader
    sights: tuple[Sight, ...]
    weighting: Weighting = field(default_factory=FixedWeights)
    reads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.sights:
            raise ValueError("an ensemble needs at least one view")

    @property
    def sees(self) -> str:
        return "+".join(sight.name for sight in self.sights)

    @property
    def wants(self) -> frozenset[str]:
        empty: frozenset[str] = frozenset()
        return empty.union(*(sight.wants for sight in self.sights))

    def begin(self, context: Context) -> _Choir:
        own = self.weighting.begin(context.batch, len(self.sights), context.device)
        room = context.request.room + 64
        seen = [sight.inputs(context, self.backbone) for sight in self.sights]
        memory = stacked(self.backbone, [self.backbone.prefill(inputs, room)[0] for inputs in seen])
        return _Choir(memory, list(context.prompt), own, self.weighting.weights(own))

    def predict_first(self, context: Context, state: _Choir) -> Categorical:
        layout, counts = waiting_block(context, state.read, state.memory.like)
        logits, _ = self.backbone.read(state.memory, layout.tiled(len(self.sights)))
        state.memory.advance(counts * len(self.sights))
        state.read = [len(row) for row in context.history]
        state.said = []
        return self._mix(context, state, logits, committed(context))

    def predict(self, context: Context, state: _Choir, nodes: Nodes) -> Categorical:
        layout = nodes.block(state.memory.like).tiled(len(self.sights))
        logits, _ = self.backbone.read(state.memory, layout)
        return self._mix(context, state, logits, nodes.prefix(context), nodes.layout.depths + 1)

    def keep(self, context: Context, state: _Choir, news: News) -> _Choir:
        views = len(self.sights)
        paths = [*news.read] * views
        kept = state.memory.commit([0] * len(paths), paths, news.nodes_read)[: context.batch]
        state.read = [read + new for read, new in zip(state.read, kept, strict=True)]
        if self.weighting.learns:
            state.weighting = self.weighting.observe(state.weighting, evidence(state.said, news))
            state.weights = self.weighting.weights(state.weighting)
        return state

    def _mix(
        self,
        context: Context,
        state: _Choir,
        logits: Tensor,
        prefix: Prefix | None,
        ahead: Tensor | int = 0,
    ) -> Categorical:  # (M * B, n, V') -> (B, n, V)
        parts = logits.chunk(len(self.sights))
        distributions = [draft_distribution(context, part, prefix, ahead) for part in parts]
        said = torch.stack([distribution.scores for distribution in distributions], -2).log_softmax(
            -1
        )
        if self.weighting.learns:
            state.said.append(said)
        return mixture(said, state.weights, distributions[0].hard)


@dataclass
class _Choir:
    """The memory of all views, and the distributions they gave in this round."""

    memory: Memory | RowMemories  # M x B rows, view by view
    read: list[int]  # committed tokens of each of B rows that are in it
    weighting: Any
    weights: Tensor  # (B, M) of this round
    said: list[Tensor] = field(default_factory=list)  # (B, n, M, V) log-probabilities each


def stacked(backbone: Reader, memories: Sequence[Memory | RowMemories]) -> Memory | RowMemories:
    """Memories of one model as one batch, shorter prompts padded on the left."""
    rows = [row for memory in memories for row in _rows(memory)]
    if isinstance(memories[0], RowMemories) or rows[0].saved is not None:
        return RowMemories(rows)
    lengths = [memory.kept[0] for memory in rows]
    pads = [
        pad + max(lengths) - length
        for memory, length in zip(rows, lengths, strict=True)
        for pad in memory.padding
    ]
    cache = SlotCache.stacked(backbone.cache_config, [memory.cache for memory in rows], lengths)
    rope = [position for memory in rows for position in memory.rope]
    like = rows[0].like
    both = Memory(cache, max(lengths), pads, rope, like, backbone.window, backbone.bare)
    both.offsets, both.last = _offsets(rows), rows[0].last
    both.axes = rows[0].axes
    return both


def _offsets(memories: Sequence[Memory]) -> Tensor | None:  # (axes, B, 1)
    """The offsets of all rows next to each other; None where nobody has any."""
    given = [memory.offsets for memory in memories]
    some = next((offsets for offsets in given if offsets is not None), None)
    if some is None:
        return None
    return torch.cat(
        [
            some.new_zeros(len(some), memory.batch, 1) if offsets is None else offsets
            for memory, offsets in zip(memories, given, strict=True)
        ],
        1,
    )


def _rows(memory: Memory | RowMemories) -> list[Memory]:
    return memory.rows if isinstance(memory, RowMemories) else [memory]


def mixture(log_probs: Tensor, weights: Tensor, hard: bool) -> Categorical:
    """Mix distributions (B, n, M, V) by weights (B, M); `hard` keeps the best token of the mixture only."""
    return Categorical((log_probs + weights.log()[:, None, :, None]).logsumexp(-2), hard)


def evidence(said: Sequence[Tensor], news: News) -> list[Evidence]:
    """Per row the members' distributions and the target's where the draft's context was kept.

    Those are the places behind the context and behind every kept node that was read: the accepted
    positions and the first rejected one.
    """
    target = Categorical(categorical(news.scores.distribution).scores).probs
    distributions = torch.cat([distribution.exp() for distribution in said], 1) if said else None
    rows = []
    for row, read in enumerate(news.read):
        own = [0, *(1 + place for place in read)]
        theirs = [0, *(1 + node for node in news.kept.path[row][: len(read)])]
        if distributions is None or not news.kept.tokens[row]:
            own = theirs = []
        none = target.new_zeros(0, 1, target.shape[-1])
        members = none if distributions is None else distributions[row, own]
        rows.append(Evidence(members, target[row, theirs]))
    return rows


def uniform_ensemble(kit: Kit) -> Drafter:
    """Views of one draft model, mixed with fixed weights (IbED)."""
    weights = kit.options["weights"]
    return _ensemble(kit, FixedWeights(None if weights is None else tuple(weights)))


def tested_ensemble(kit: Kit) -> Drafter:
    """Views of one draft model, mixed with weights chosen while decoding (TABED)."""
    return _ensemble(kit, Agreement(kit.options["steps"], kit.options["window"]))


VIEWS = ("pixels", "nothing", "pooled", "placeholders")


def with_views(
    architecture: Callable[[Kit], Drafter], verifier: Verifier, paper: str, **options: Any
) -> Recipe:
    """A recipe whose drafts come from the views of one small model; `options` beside `views`."""
    return Recipe(
        architecture=architecture,
        execution=Chain(Fixed(5)),
        verifier=verifier,
        sees="pixels",
        draft_model=(SMALL_MODEL,),
        options={"views": VIEWS[:3], **options},
        paper=paper,
        reconstructed="no caption view",
    )


def _ensemble(kit: Kit, weighting: Weighting) -> Drafter:
    if kit.sees != "pixels":
        raise ValueError(
            f"an ensemble chooses its own sights; give views= out of {', '.join(VIEWS)}, not sees="
        )
    views: Sequence[str] = kit.options["views"]
    if isinstance(views, str) or not views or set(views) - set(VIEWS):
        raise ValueError(f"views={views!r} must be a list out of {', '.join(VIEWS)}")
    assert kit.drafter is not None
    sights = tuple(_view(kit, name) for name in views)
    return grown(kit, Ensemble(kit.drafter, sights, weighting))


def _view(kit: Kit, name: str) -> Sight:
    assert kit.drafter is not None
    if name == "pooled":
        return compressed_pixels(kit.drafter, kit.compressor or AveragePool())
    if name == "pixels":
        return Pixels()
    if name == "placeholders":
        return Placeholders()
    return Nothing(kit.target.visual_ids)
