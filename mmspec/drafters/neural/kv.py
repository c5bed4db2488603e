"""Which of the target's keys and values a drafter reads that runs the target's own layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.compressors.contract import Compressor
from mmspec.declared import declared
from mmspec.drafters.neural.sight import TargetFeatures, checked
from mmspec.errors import check_number
from mmspec.models.heads.aasd import KvProjector, run_means
from mmspec.naming import parameters
from mmspec.recipe import Kit
from mmspec.targets.memory import Memory
from mmspec.targets.readers.attention_tap import HEADS, AttentionTap
from mmspec.targets.readers.backbone import ROOM, Backbone
from mmspec.targets.readers.kv_view import KvView, gathered
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


class Kv(ABC):
    """Keys and values that a drafter reads. They change what is accepted, never what comes out."""

    sees: ClassVar[str]  # what a run reports

    @declared
    def wants(self) -> frozenset[str]:
        """What the target shall offer, as for a `Drafter`."""
        return frozenset()

    @abstractmethod
    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        """A view for these layers of `reader`, behind the prompt; None = the target's own memory.

        Nothing is copied where a view would hold all of it.
        """

    def renewal(self, context: Context, reader: Reader, view: KvView) -> AttentionTap | None:
        """What watches the layers of `reader` for a new view in this round; None = it stays.

        A drafter that is given one reads what waits on the target's own memory meanwhile.
        """
        return None

    def renew(
        self, context: Context, reader: Reader, layers: Sequence[int], tap: AttentionTap
    ) -> KvView:
        """The view that follows from what `tap` saw."""
        raise TypeError(f"{type(self).__name__} makes its view once")


@dataclass(frozen=True)
class SameKv(Kv):
    """All of the target's memory, where it lies."""

    sees: ClassVar[str] = "target-memory"

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> None:
        return None


@dataclass(frozen=True)
class TextKv(Kv):
    """Text only: no key and no value of a visual token (text-anchored window of Sparrow, 2026)."""

    sees: ClassVar[str] = "target-memory of text"

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        text, visual = _slots(context, reader)
        if not any(map(len, visual)):
            return None
        return _gathered(context, reader, {layer: [own[None] for own in text] for layer in layers})


@dataclass(frozen=True)
class SparseKv(Kv):
    """Text, and the `tokens` visual ones that the question attends to most, per layer and head.

    StD (Zhang et al. 2025): scored once, by the target's prefill, and summed over the query heads
    that share a head of keys. Layers with a sliding window count the slots of the view. Needs
    attention that can be tapped (sdpa). tokens=0 is text only; from the number of visual tokens on
    it is the target's own memory.

    every=n > 0 chooses anew after n drafts on a view, by what the newest token attends to: that one
    is read on the target's own memory, so that one step of such a draft costs as much as on all
    tokens, and is right. Reconstructed: re-implementations take the verifier's attention.
    """

    tokens: int = 512
    every: int = 0
    sees: ClassVar[str] = "sparse target-memory"
    wants: ClassVar[frozenset[str]] = frozenset({HEADS})

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"tokens={self.tokens} is no number of visual tokens; give 0 or more")
        check_number("every", self.every, 0, whole=True, example=8)

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        _, visual = _slots(context, reader)
        if all(len(own) <= self.tokens for own in visual):
            return None
        return self._chosen(context, reader, layers, context.shared[HEADS])

    def renewal(self, context: Context, reader: Reader, view: KvView) -> AttentionTap | None:
        if not self.every or view.drafts < self.every:
            return None
        return AttentionTap(reader, self.wants, [1] * context.batch)

    def renew(
        self, context: Context, reader: Reader, layers: Sequence[int], tap: AttentionTap
    ) -> KvView:
        cache = _memory(context).cache
        unread = {at: cache.plan.low for at in layers if cache.layers[at].window is not None}
        scores = {at: functional.pad(tap.mean[at], (unread.get(at, 0), 0)) for at in layers}
        return self._chosen(context, reader, layers, scores)

    def _chosen(
        self, context: Context, reader: Reader, layers: Sequence[int], scores: Any
    ) -> KvView:
        """The best of the visual slots by the scores (B, G, L) of each layer."""
        text, visual = _slots(context, reader)
        slots = {}
        for layer in layers:
            heads = _memory(context).cache.layers[layer].keys.shape[1]
            grouped = scores[layer].unflatten(1, (heads, -1)).mean(2)  # (B, G, L)
            rows = zip(grouped, text, visual, strict=True)
            slots[layer] = [top_slots(*own, self.tokens) for own in rows]
        return _gathered(context, reader, slots)


def top_slots(scores: Tensor, text: Tensor, visual: Tensor, count: int) -> Tensor:
    """Slots (G, t + k) of the text (t,) and of each head's best `count` of the visual ones (n,).

    Ascending; ties of the scores (G, L) go to the earlier slot.
    """
    order = scores[:, visual].sort(dim=-1, descending=True, stable=True).indices[:, :count]
    both = torch.cat((text.expand(len(scores), -1), visual[order]), 1)
    return both.sort(-1).values


@dataclass(frozen=True)
class TokensKv(Kv):
    """Text, and the visual tokens whose slots a compressor of the target's features leaves.

    The same for all layers and heads. A compressor that averages is read at the slots that its
    averages stand at.
    """

    features: TargetFeatures
    sees: ClassVar[str] = "target-memory of kept tokens"

    @property
    def wants(self) -> frozenset[str]:
        return self.features.wants

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        text, visual = _slots(context, reader)
        kept = []
        for own, pad, seen, every in zip(
            text, context.padding, self.features.seen(context), visual, strict=True
        ):
            left = [picture.positions.to(own.device) + pad for picture in seen]
            chosen = torch.cat([*left, every[:0]])
            kept.append(torch.cat((own, chosen)).unique()[None])
        pairs = zip(kept, text, visual, strict=True)
        if all(one.shape[1] == len(own) + len(every) for one, own, every in pairs):
            return None
        return _gathered(context, reader, {layer: kept for layer in layers})


@dataclass(frozen=True)
class PooledKv(Kv):
    """Text, and of every picture `tokens` means over runs of its keys and values.

    What the projection of AASD (Yang et al. 2025) begins as. Pictures of no more slots stay as they
    are.
    """

    tokens: int = 64
    sees: ClassVar[str] = "pooled target-memory"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} is no number of means; give 1 or more")

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        def pooled(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            means = run_means(self.tokens, keys.shape[1]).to(keys)
            return means @ keys, means @ values

        return _projected(context, reader, layers, self.tokens, pooled)


@dataclass(frozen=True, eq=False)
class ProjectedKv(Kv):
    """Text, and of every picture what a learned projection along its tokens makes (AASD).

    Yang et al. 2025. The same weights for all layers that are asked for.
    """

    projector: KvProjector
    sees: ClassVar[str] = "projected target-memory"

    def open(self, context: Context, reader: Reader, layers: Sequence[int]) -> KvView | None:
        return _projected(context, reader, layers, self.projector.slots, self.projector)


def pictures_of(visual: Tensor) -> list[Tensor]:
    """Slots (n,) of visual tokens, picture by picture; pictures that touch are one."""
    ends = (visual.diff() > 1).nonzero()[:, 0] + 1
    return [one for one in visual.tensor_split(ends.cpu()) if len(one)]


def _projected(
    context: Context,
    reader: Reader,
    layers: Sequence[int],
    count: int,
    project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> KvView | None:
    """A view in which the last `count` slots of every larger picture hold what it is made into."""
    text, visual = _slots(context, reader)
    pictures = [pictures_of(own) for own in visual]
    if not any(len(one) > count for row in pictures for one in row):
        return None
    kept = [
        torch.cat((own, *(one[-count:] for one in row))).sort().values
        for own, row in zip(text, pictures, strict=True)
    ]
    view = _gathered(context, reader, {layer: [own[None] for own in kept] for layer in layers})
    width = max(map(len, kept))
    for layer in layers:
        source, into = _memory(context).cache.layers[layer], view.memory.cache.layers[layer]
        for row, own in enumerate(kept):
            for one in pictures[row]:
                if len(one) > count:
                    where = torch.searchsorted(own, one[-count:]) + width - len(own)
                    made = project(source.keys[row][:, one], source.values[row][:, one])
                    into.keys[row][:, where], into.values[row][:, where] = made
    return view


KV: Mapping[str, type[Any]] = {
    **{"same": SameKv, "sparse": SparseKv, "text": TextKv},
    "pooled": PooledKv,
}
NAMES = (*KV, "tokens")


def kv_of(kit: Kit) -> Kv:
    """What `kit.kv` names: "same", "text", "sparse:tokens=256", "pooled", "tokens", or an object.

    "tokens" takes those that `kit.compressor` leaves. Raises ValueError for unknown names, and for
    a compressor that nothing would take.
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
        found = KV[name](**parameters(rest, {f.name: f.default for f in fields(KV[name])}, name))
    if kit.compressor is not None:
        raise ValueError(
            f"compressor={kit.compressor!r} thins pictures, but this drafter reads the target's "
            "memory; give kv='tokens' to read what it leaves, or drop compressor="
        )
    return found


def check_viewable(target: Reader) -> None:
    """Refuse a target without one memory to look into. Raises ValueError."""
    if not isinstance(target, Backbone):
        raise ValueError(
            f"{type(target.model).__name__} is read behind guidance or an encoder, and a part of "
            "its memory cannot be read alone; give kv='same', or a recipe with a draft model"
        )


def _tokens(kit: Kit) -> TokensKv:
    check_viewable(kit.target)
    if kit.compressor is None:
        names = "compressor='top-p-uniform:keep=0.25' or another of `mmspec compressors`"
        raise ValueError(f"kv='tokens' reads what a compressor leaves; give {names}")
    kit.target.check_features()
    compressor: Compressor = checked(kit.compressor, kit.target, kit.target.config.hidden_size)
    return TokensKv(TargetFeatures(kit.target.feature_layout(), kit.target, compressor))


def _memory(context: Context) -> Memory:
    """Raises ValueError where rows are read alone; recurrent layers are refused before."""
    memory = context.memory
    if not isinstance(memory, Memory) or memory.is_stepwise:
        raise ValueError(
            "the target is read in its own steps, row by row, and a part of its memory cannot be "
            "read so; give kv='same', or a recipe with a draft model"
        )
    return memory


def _slots(context: Context, reader: Reader) -> tuple[list[Tensor], list[Tensor]]:
    """Slots of text and of visual tokens per row, of all that the target has kept; no padding.

    The last slot counts as text: every row of a view ends on it.
    """
    placeholders = set(reader.placeholder_ids)
    text, visual = [], []
    rows = zip(context.history, context.memory.kept, context.padding, strict=True)
    for at, (row, kept, pad) in enumerate(rows):
        before = context.unknown[at] if context.unknown else 0
        known = row[: kept - pad - before - 1]
        is_visual = [False] * before + [token in placeholders for token in known] + [False]
        marks = torch.tensor(is_visual, device=context.device)
        text.append((~marks).nonzero()[:, 0] + pad)
        visual.append(marks.nonzero()[:, 0] + pad)
    return text, visual


def _gathered(context: Context, reader: Reader, slots: Mapping[int, Sequence[Tensor]]) -> KvView:
    room = min(context.request.room, ROOM) + 64
    return gathered(_memory(context), reader.cache_config, slots, room)
