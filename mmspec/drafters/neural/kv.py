"""Which of the target's keys and values a drafter reads that runs the target's own layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec._attributes import default_property
from mmspec.compressors.contract import Compressor
from mmspec.drafters.neural.draft_inputs import TargetFeatureInputs, resolve_compressor
from mmspec.errors import check_number, parse_parameters
from mmspec.models.heads.aasd import KvProjector, run_means
from mmspec.recipe import Kit
from mmspec.targets.memory import Memory
from mmspec.targets.readers.attention_tap import HEADS, AttentionTap
from mmspec.targets.readers.backbone import MAX_RESERVED_SLOTS, Backbone
from mmspec.targets.readers.kv_view import KvView, gather_view
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


class Kv(ABC):
    """Keys and values that a drafter reads. They affect acceptance, never the output."""

    sees: ClassVar[str]  # reported in `Stats`

    @default_property
    def required_features(self) -> frozenset[str]:
        """Features that the target must provide, as for a `Drafter`."""
        return frozenset()

    @abstractmethod
    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        """A view for these layers of `reader` after the prompt; None = the target's own cache.

        Nothing is copied where a view would hold all of it.
        """

    def renewal(self, context: Context, reader: Reader, view: KvView) -> AttentionTap | None:
        """The tap that records attention in this round to choose a new view; None = the view stays.

        With a tap the drafter reads the waiting tokens on the target's own cache.
        """
        return None

    def renew(
        self, context: Context, reader: Reader, layers: Sequence[int], tap: AttentionTap
    ) -> KvView:
        """The view chosen from the attention recorded by `tap`."""
        raise TypeError(f"{type(self).__name__} does not renew its view")


@dataclass(frozen=True)
class SameKv(Kv):
    """All of the target's cache."""

    sees: ClassVar[str] = "target-memory"

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> None:
        return None


@dataclass(frozen=True)
class TextKv(Kv):
    """Text only: no keys or values of visual tokens (text-anchored window of Sparrow, 2026)."""

    sees: ClassVar[str] = "target-memory of text"

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        text, visual = _slots(context, reader)
        if not any(map(len, visual)):
            return None
        return _gather_view(
            context, reader, {layer: [own[None] for own in text] for layer in layers}
        )


@dataclass(frozen=True)
class SparseKv(Kv):
    """Text, and the `tokens` visual tokens that the question attends to most, per layer and head.

    StD (Zhang et al. 2025): scored once, by the target's prefill, and summed over the query heads
    that share a key head. In layers with a sliding window the window counts slots of the view.
    Needs attention that can be tapped (sdpa). At most the `share` of a row's visual tokens is read.
    tokens=0 is text only; at least the number of visual tokens is the target's own cache.

    every=n > 0 selects again after n drafts on a view, by the attention of the newest token: that
    one is read on the target's own cache, so that one step of such a draft costs as much as on all
    tokens, and is exact. Reconstructed: re-implementations use the verifier's attention.
    """

    tokens: int = 512
    every: int = 0
    share: float = 1.0
    sees: ClassVar[str] = "sparse target-memory"
    required_features: ClassVar[frozenset[str]] = frozenset({HEADS})

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(
                f"tokens={self.tokens} is not a number of visual tokens; give 0 or more"
            )
        check_number("every", self.every, 0, whole=True, example=8)
        check_number("share", self.share, 0, 1, example=0.25)

    def _count(self, visual: Tensor) -> int:
        return min(self.tokens, int(self.share * len(visual)))

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        _, visual = _slots(context, reader)
        if all(len(own) == self._count(own) for own in visual):
            return None
        return self._select_top(context, reader, layers, context.shared[HEADS])

    def renewal(self, context: Context, reader: Reader, view: KvView) -> AttentionTap | None:
        if not self.every or view.drafts < self.every:
            return None
        return AttentionTap(reader, self.required_features, [1] * context.batch)

    def renew(
        self, context: Context, reader: Reader, layers: Sequence[int], tap: AttentionTap
    ) -> KvView:
        cache = _memory(context).cache
        unread = {at: cache.plan.low for at in layers if cache.layers[at].window is not None}
        scores = {at: functional.pad(tap.mean[at], (unread.get(at, 0), 0)) for at in layers}
        return self._select_top(context, reader, layers, scores)

    def _select_top(
        self, context: Context, reader: Reader, layers: Sequence[int], scores: Any
    ) -> KvView:
        """The best visual slots by the scores (B, G, L) of each layer."""
        text, visual = _slots(context, reader)
        slots = {}
        for layer in layers:
            heads = _memory(context).cache.layers[layer].keys.shape[1]
            grouped = scores[layer].unflatten(1, (heads, -1)).mean(2)  # (B, G, L)
            rows = zip(grouped, text, visual, strict=True)
            slots[layer] = [top_slots(*own, self._count(own[2])) for own in rows]
        return _gather_view(context, reader, slots)


def top_slots(scores: Tensor, text: Tensor, visual: Tensor, count: int) -> Tensor:
    """Slots (G, t + k) of the text (t,) and of each head's best `count` of the visual ones (n,).

    Ascending; ties of the scores (G, L) go to the earlier slot.
    """
    order = scores[:, visual].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    slots = torch.cat((text.expand(len(scores), -1), visual[order]), 1)
    return slots.sort(-1).values


@dataclass(frozen=True)
class TokensKv(Kv):
    """Text, and the visual tokens at the slots that a compressor of the target's features keeps.

    The same for all layers and heads. A compressor that averages is read at the slots of its
    averages.
    """

    features: TargetFeatureInputs
    sees: ClassVar[str] = "target-memory of kept tokens"

    @property
    def required_features(self) -> frozenset[str]:
        return self.features.required_features

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        text, visual = _slots(context, reader)
        kept_slots = []
        for own, pad, images, visual_slots in zip(
            text, context.padding, self.features.compressed_images(context), visual, strict=True
        ):
            left = [image.positions.to(own.device) + pad for image in images]
            selected = torch.cat([*left, visual_slots[:0]])
            kept_slots.append(torch.cat((own, selected)).unique()[None])
        pairs = zip(kept_slots, text, visual, strict=True)
        if all(one.shape[1] == len(own) + len(visual_slots) for one, own, visual_slots in pairs):
            return None
        return _gather_view(context, reader, {layer: kept_slots for layer in layers})


@dataclass(frozen=True)
class PooledKv(Kv):
    """Text, and per image `tokens` means over runs of its keys and values.

    The initialisation of AASD's projection (Yang et al. 2025). Images with no more slots stay as
    they are.
    """

    tokens: int = 64
    sees: ClassVar[str] = "pooled target-memory"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} is not a number of means; give 1 or more")

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        def pool(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            means = run_means(self.tokens, keys.shape[1]).to(keys)
            return means @ keys, means @ values

        return _build_projected_view(context, reader, layers, self.tokens, pool)


@dataclass(frozen=True, eq=False)
class ProjectedKv(Kv):
    """Text, and per image a learned projection along its tokens (AASD, Yang et al. 2025).

    The same weights for all requested layers.
    """

    projector: KvProjector
    sees: ClassVar[str] = "projected target-memory"

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        return _build_projected_view(context, reader, layers, self.projector.slots, self.projector)


@dataclass(frozen=True)
class WindowKv(Kv):
    """The first `sinks` tokens of the prompt and its last `tokens`, text or images.

    MagicDec (Chen et al. 2024), after StreamingLLM (Xiao et al. 2024); of each row, without
    padding. The view grows with the generated text. A prompt that is no longer is read as a whole.
    """

    tokens: int = 256
    sinks: int = 4
    sees: ClassVar[str] = "window of target-memory"

    def __post_init__(self) -> None:
        check_number("tokens", self.tokens, 1, whole=True, example=256)
        check_number("sinks", self.sinks, 0, whole=True, example=4)

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        rows = [*zip(context.padding, context.memory.lengths, strict=True)]
        if all(length - pad <= self.sinks + self.tokens for pad, length in rows):
            return None
        slots = []
        for pad, length in rows:
            own = torch.arange(pad, length, device=context.device)
            first = min(self.sinks, len(own))
            slots.append(torch.cat((own[:first], own[first:][-self.tokens :]))[None])
        return _gather_view(context, reader, {layer: slots for layer in layers})


def split_images(visual: Tensor) -> list[Tensor]:
    """Slots (n,) of visual tokens, image by image; adjacent images count as one."""
    ends = (visual.diff() > 1).nonzero()[:, 0] + 1
    return [one for one in visual.tensor_split(ends.cpu()) if len(one)]


def _build_projected_view(
    context: Context,
    reader: Reader,
    layers: Sequence[int],
    count: int,
    project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> KvView | None:
    """A view in which the last `count` slots of every larger image hold its projection."""
    text, visual = _slots(context, reader)
    pictures = [split_images(own) for own in visual]
    if not any(len(one) > count for row in pictures for one in row):
        return None
    kept_slots = [
        torch.cat((own, *(one[-count:] for one in row))).sort().values
        for own, row in zip(text, pictures, strict=True)
    ]
    view = _gather_view(
        context, reader, {layer: [own[None] for own in kept_slots] for layer in layers}
    )
    width = max(map(len, kept_slots))
    for layer in layers:
        source, destination = _memory(context).cache.layers[layer], view.memory.cache.layers[layer]
        for row, own in enumerate(kept_slots):
            for one in pictures[row]:
                if len(one) > count:
                    where = torch.searchsorted(own, one[-count:]) + width - len(own)
                    projected = project(source.keys[row][:, one], source.values[row][:, one])
                    destination.keys[row][:, where], destination.values[row][:, where] = projected
    return view


KV: Mapping[str, type[Any]] = {
    **{"same": SameKv, "sparse": SparseKv, "text": TextKv},
    **{"pooled": PooledKv, "window": WindowKv},
}
NAMES = (*KV, "tokens")


def kv_of(kit: Kit) -> Kv:
    """The option `kv`: "same", "text", "sparse:tokens=256", "pooled", "window", "tokens", a `Kv`.

    "tokens" reads those that `kit.compressor` keeps. Raises ValueError for unknown names, and for a
    compressor without effect.
    """
    if isinstance(kit.kv, Kv):
        found = kit.kv
    else:
        name, _, rest = str(kit.kv).partition(":")
        if name == "tokens" and not rest:
            return _tokens(kit)
        if name not in KV:
            raise ValueError(f"kv={kit.kv!r} is not known; choose one of {', '.join(NAMES)}")
        if KV[name] is not SameKv:
            check_viewable(kit.target)
        found = KV[name](
            **parse_parameters(rest, {f.name: f.default for f in fields(KV[name])}, name)
        )
    if kit.compressor is not None:
        raise ValueError(
            f"compressor={kit.compressor!r} compresses images, but this drafter reads the target's "
            "cache; give kv='tokens' to read the tokens it keeps, or drop compressor="
        )
    return found


def check_viewable(target: Reader) -> None:
    """Refuse a target whose cache cannot be read in part. Raises ValueError."""
    if not isinstance(target, Backbone):
        raise ValueError(
            f"{type(target.model).__name__} is read with guidance or after an encoder, and a part "
            "of its cache cannot be read alone; give kv='same', or a recipe with a draft model"
        )


def _tokens(kit: Kit) -> TokensKv:
    check_viewable(kit.target)
    if kit.compressor is None:
        names = "compressor='top-p-uniform:keep=0.25' or another of `mmspec compressors`"
        raise ValueError(f"kv='tokens' reads the tokens that a compressor keeps; give {names}")
    kit.target.check_features()
    compressor: Compressor = resolve_compressor(
        kit.compressor, kit.target, kit.target.config.hidden_size
    )
    return TokensKv(TargetFeatureInputs(kit.target.feature_layout(), kit.target, compressor))


def _memory(context: Context) -> Memory:
    """Raises ValueError where rows are read one by one; recurrent layers are refused earlier."""
    memory = context.memory
    if not isinstance(memory, Memory) or memory.is_stepwise:
        raise ValueError(
            "the target reads its rows one by one, and a part of its cache cannot be read then; "
            "give kv='same', or a recipe with a draft model"
        )
    return memory


def _slots(context: Context, reader: Reader) -> tuple[list[Tensor], list[Tensor]]:
    """Cached slots of text and of visual tokens per row; no padding.

    The last slot counts as text: every row of a view ends with it.
    """
    placeholders = set(reader.placeholder_ids)
    text, visual = [], []
    rows = zip(context.history, context.memory.lengths, context.padding, strict=True)
    for at, (row, kept_slots, pad) in enumerate(rows):
        before = context.num_unknown[at] if context.num_unknown else 0
        known = row[: kept_slots - pad - before - 1]
        is_visual = [False] * before + [token in placeholders for token in known] + [False]
        marks = torch.tensor(is_visual, device=context.device)
        text.append((~marks).nonzero()[:, 0] + pad)
        visual.append(marks.nonzero()[:, 0] + pad)
    return text, visual


def _gather_view(context: Context, reader: Reader, slots: Mapping[int, Sequence[Tensor]]) -> KvView:
    room = min(context.request.max_new_tokens, MAX_RESERVED_SLOTS) + 64
    return gather_view(_memory(context), reader.cache_config, slots, room)
