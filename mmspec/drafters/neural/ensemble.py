"""Drafting from the mixture of several views of one draft model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.compressors.average_pool import AveragePool
from mmspec.distributions.categorical import Categorical, as_categorical
from mmspec.distributions.sampling import Prefix
from mmspec.draft import Drafter, Verifier
from mmspec.drafters.draft_model import (
    DraftModel,
    DraftNodes,
    DraftUpdate,
    committed_prefix,
    draft_distribution,
    waiting_block,
)
from mmspec.drafters.lengths.length import Fixed
from mmspec.drafters.lookup.given_text import find_tokenizer
from mmspec.drafters.neural.draft_inputs import (
    CAPTIONS,
    CaptionInputs,
    DraftInputs,
    PixelInputs,
    PlaceholderInputs,
    TextInputs,
    compressed_pixels,
)
from mmspec.drafters.neural.small_model import (
    SMALL_MODEL,
    build_autoregressive,
    check_prompt,
    check_unread,
)
from mmspec.drafters.neural.weighting import Agreement, Evidence, FixedWeights, Weighting
from mmspec.drafters.shapes import Chain
from mmspec.errors import format_value, is_integer
from mmspec.models.compatibility import check_same_device
from mmspec.recipe import Kit, Recipe
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory, RowMemories
from mmspec.targets.readers.reader import Reader
from mmspec.targets.readers.rotary import PositionTable
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class Ensemble(DraftModel):
    """q = sum_m w_m q_m over the `views` of a draft model (IbED, Lee et al. 2024; TABED).

    All views read the same draft as one batch of M x B rows, so that a level of the draft is one
    forward; only their prompts are read one by one. Probabilities are mixed, not logits, and the
    mixture is recorded, so this is exact with every lossless verifier. Greedy drafting takes the
    best token of the mixture of softmax distributions. Weights are per row.
    """

    backbone: Reader
    views: tuple[DraftInputs, ...]
    weighting: Weighting = field(default_factory=FixedWeights)
    captions: CaptionReader | None = None  # None = no view reads captions
    reads_prompt: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.views:
            raise ValueError("an ensemble needs at least one view")

    @property
    def sees(self) -> str:
        return "+".join(view.name for view in self.views)

    @property
    def required_features(self) -> frozenset[str]:
        empty: frozenset[str] = frozenset()
        return empty.union(*(view.required_features for view in self.views))

    @property
    def input_names(self) -> frozenset[str]:
        return frozenset() if self.captions is None else frozenset({CAPTIONS})

    def prepare_inputs(self, inputs: Mapping[str, Any], batch: int) -> Mapping[str, Any]:
        if self.captions is None:
            return inputs
        return {**inputs, CAPTIONS: self.captions.read(inputs.get(CAPTIONS), batch)}

    def begin(self, context: Context) -> _EnsembleState:
        indices = self.weighting.begin(context.batch, len(self.views), context.device)
        max_tokens = context.request.max_new_tokens + 64
        inputs_per_view = [view.build(context, self.backbone) for view in self.views]
        for inputs in inputs_per_view:
            check_prompt(self.backbone, context, inputs)
        memory = stack_memories(
            self.backbone,
            [self.backbone.prefill(inputs, max_tokens)[0] for inputs in inputs_per_view],
        )
        self.backbone.prepare_graphs(memory, context.request.max_new_tokens)
        return _EnsembleState(
            memory, list(context.prompt), indices, self.weighting.weights(indices)
        )

    def predict_first(self, context: Context, state: _EnsembleState) -> Categorical:
        check_unread(self.backbone, context, state.read)
        layout, counts = waiting_block(context, state.read, state.memory.like)
        logits, _ = self.backbone.read(state.memory, layout.repeat_batch(len(self.views)))
        state.memory.advance(counts * len(self.views))
        state.read = [len(row) for row in context.history]
        state.log_probs = []
        return self._mix(context, state, logits, committed_prefix(context))

    def predict(self, context: Context, state: _EnsembleState, nodes: DraftNodes) -> Categorical:
        layout = nodes.block(state.memory.like).repeat_batch(len(self.views))
        logits, _ = self.backbone.read(state.memory, layout)
        return self._mix(context, state, logits, nodes.prefix(context), nodes.layout.depths + 1)

    def keep(self, context: Context, state: _EnsembleState, update: DraftUpdate) -> _EnsembleState:
        views = len(self.views)
        paths = [*update.read] * views
        num_committed = state.memory.commit([0] * len(paths), paths, update.nodes_read)[
            : context.batch
        ]
        state.read = [read + new for read, new in zip(state.read, num_committed, strict=True)]
        if self.weighting.learns:
            state.weighting = self.weighting.observe(
                state.weighting, evidence(state.log_probs, update)
            )
            state.weights = self.weighting.weights(state.weighting)
        return state

    def _mix(
        self,
        context: Context,
        state: _EnsembleState,
        logits: Tensor,
        prefix: Prefix | None,
        ahead: Tensor | int = 0,
    ) -> Categorical:  # (M * B, n, V') -> (B, n, V)
        parts = logits.chunk(len(self.views))
        distributions = [draft_distribution(context, part, prefix, ahead) for part in parts]
        log_probs = torch.stack(
            [distribution.scores for distribution in distributions], -2
        ).log_softmax(-1)
        if self.weighting.learns:
            state.log_probs.append(log_probs)
        return mix_distributions(log_probs, state.weights, distributions[0].hard)


@dataclass(frozen=True)
class CaptionReader:
    """Captions of a call as token ids of the draft model."""

    tokenizer: Any  # None = texts cannot be read
    vocabulary: int

    def read(self, captions: Any, batch: int) -> list[list[int]]:
        """Ids per row of texts, which begin with "image: " as in TABED, or of ids, read as given.

        None is the caption of a row without an image. Raises ValueError for captions that are
        missing, not one per row, or neither.
        """
        is_list = isinstance(captions, list | tuple)
        if not is_list or len(captions) != batch:
            shown = f"{len(captions)} captions" if is_list else format_value(captions)
            raise ValueError(
                f"drafter_inputs has {CAPTIONS}={shown} for {batch} prompts, and the view "
                f"'caption' reads one of each; give drafter_inputs={{{CAPTIONS!r}: [text, ...]}}, "
                "or leave 'caption' out of views="
            )
        return [[] if one is None else self._ids(one) for one in captions]

    def _ids(self, caption: Any) -> list[int]:
        if isinstance(caption, str):
            if self.tokenizer is None:
                raise ValueError(
                    "captions are texts, and the target's tokenizer was not found beside its "
                    "weights; give processor= to accelerate, or captions of token ids"
                )
            ids = self.tokenizer(f"image: {caption}", add_special_tokens=False).input_ids
            return [one for one in ids if one < self.vocabulary]
        ids = caption.tolist() if isinstance(caption, Tensor) else caption
        if isinstance(ids, list | tuple) and all(
            is_integer(one) and 0 <= one < self.vocabulary for one in ids
        ):
            return list(ids)
        raise ValueError(
            f"a caption is a text or a list of token ids below {self.vocabulary}, not "
            f"{format_value(caption)}; give one of these"
        )


@dataclass
class _EnsembleState:
    """The cache of all views, and their distributions in this round."""

    memory: Memory | RowMemories  # M x B rows, view by view
    read: list[int]  # committed tokens in the cache, per row (B)
    weighting: Any
    weights: Tensor  # (B, M) of this round
    log_probs: list[Tensor] = field(default_factory=list)  # (B, n, M, V) log-probabilities each


def stack_memories(
    backbone: Reader, memories: Sequence[Memory | RowMemories]
) -> Memory | RowMemories:
    """Caches of one model as one batch, shorter prompts padded on the left."""
    rows = [row for memory in memories for row in _rows(memory)]
    if isinstance(memories[0], RowMemories) or rows[0].saved_state is not None:
        return RowMemories(rows)
    lengths = [memory.lengths[0] for memory in rows]
    pads = [
        pad + max(lengths) - length
        for memory, length in zip(rows, lengths, strict=True)
        for pad in memory.padding
    ]
    cache = SlotCache.stack(backbone.cache_config, [memory.cache for memory in rows], lengths)
    rope = [position for memory in rows for position in memory.rope]
    like = rows[0].like
    stacked = Memory(cache, max(lengths), pads, rope, like, backbone.window, backbone.is_maskless)
    stacked.offsets, stacked.max_position = _offsets(rows), rows[0].max_position
    stacked.axes = rows[0].axes
    tables = [memory.table for memory in rows if memory.table is not None]
    stacked.table = PositionTable.concatenate(tables) if tables else None
    return stacked


def _offsets(memories: Sequence[Memory]) -> Tensor | None:  # (axes, B, 1)
    """The offsets of all rows; None where no row has any."""
    given = [memory.offsets for memory in memories]
    first = next((offsets for offsets in given if offsets is not None), None)
    if first is None:
        return None
    return torch.cat(
        [
            first.new_zeros(len(first), memory.batch, 1) if offsets is None else offsets
            for memory, offsets in zip(memories, given, strict=True)
        ],
        1,
    )


def _rows(memory: Memory | RowMemories) -> list[Memory]:
    return memory.rows if isinstance(memory, RowMemories) else [memory]


def mix_distributions(log_probs: Tensor, weights: Tensor, hard: bool) -> Categorical:
    """Mix distributions (B, n, M, V) by weights (B, M); `hard` keeps only the best token."""
    return Categorical((log_probs + weights.log()[:, None, :, None]).logsumexp(-2), hard)


def evidence(log_probs: Sequence[Tensor], update: DraftUpdate) -> list[Evidence]:
    """Per row the distributions of members and target at the accepted prefixes of the draft.

    Those are the context and every accepted node that was read: the accepted positions and the
    first rejected one.
    """
    target = Categorical(as_categorical(update.scores.distribution).scores).probs
    distributions = (
        torch.cat([distribution.exp() for distribution in log_probs], 1) if log_probs else None
    )
    rows = []
    for row, read in enumerate(update.read):
        indices = [0, *(1 + place for place in read)]
        target_indices = [0, *(1 + node for node in update.round.path[row][: len(read)])]
        if distributions is None or not update.round.tokens[row]:
            indices = target_indices = []
        none = target.new_zeros(0, 1, target.shape[-1])
        members = none if distributions is None else distributions[row, indices]
        rows.append(Evidence(members, target[row, target_indices]))
    return rows


def uniform_ensemble(kit: Kit) -> Drafter:
    """Views of one draft model, mixed with fixed weights (IbED)."""
    weights, views = kit.options["weights"], kit.options["views"]
    is_list = isinstance(weights, list | tuple)
    if weights is not None and not (is_list and len(weights) == len(views)):
        raise ValueError(
            f"weights={format_value(weights)} must be a list of {len(views)} numbers; give one for "
            "each of views="
        )
    return _ensemble(kit, FixedWeights(None if weights is None else tuple(weights)))


def tested_ensemble(kit: Kit) -> Drafter:
    """Views of one draft model, mixed with weights adapted while decoding (TABED)."""
    return _ensemble(kit, Agreement(kit.options["steps"], kit.options["window"]))


VIEWS = ("pixels", "nothing", "pooled", "placeholders", "caption")


def with_views(
    architecture: Callable[[Kit], Drafter], verifier: Verifier, paper: str, **options: Any
) -> Recipe:
    """A recipe with views of one small model; `options` extend `views`."""
    return Recipe(
        architecture=architecture,
        execution=Chain(Fixed(5)),
        verifier=verifier,
        sees="pixels",
        draft_model=(SMALL_MODEL,),
        needs=("image input",),
        options={"views": VIEWS[:3], "processor": None, **options},
        paper=paper,
    )


def _ensemble(kit: Kit, weighting: Weighting) -> Drafter:
    if kit.sees != "pixels":
        raise ValueError(
            f"an ensemble has its own views; give views= out of {', '.join(VIEWS)}, not sees="
        )
    names: Sequence[str] = kit.options["views"]
    if isinstance(names, str) or not names or set(names) - set(VIEWS):
        raise ValueError(f"views={names!r} must be a list out of {', '.join(VIEWS)}")
    assert kit.drafter is not None
    check_same_device(kit.target, kit.drafter)
    views = tuple(_view(kit, name) for name in names)
    captions = _caption_reader(kit) if "caption" in names else None
    return build_autoregressive(kit, Ensemble(kit.drafter, views, weighting, captions))


def _caption_reader(kit: Kit) -> CaptionReader:
    """Reads captions with the tokenizer of the target, which the draft model shares."""
    assert kit.drafter is not None
    return CaptionReader(find_tokenizer(kit), kit.drafter.vocabulary)


def _view(kit: Kit, name: str) -> DraftInputs:
    assert kit.drafter is not None
    if name == "pooled":
        return compressed_pixels(kit.drafter, kit.compressor or AveragePool())
    if name == "pixels":
        return PixelInputs()
    if name == "placeholders":
        return PlaceholderInputs()
    if name == "caption":
        return CaptionInputs(kit.target.visual_ids)
    return TextInputs(kit.target.visual_ids)
