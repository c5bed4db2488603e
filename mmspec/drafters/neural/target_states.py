"""States of a target that small networks on top of it read: of a prompt, and of what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from mmspec.drafters.growth import DraftModel, News
from mmspec.recipe import STATES
from mmspec.targets.cache import SlotCache
from mmspec.targets.memory import Memory
from mmspec.targets.readers.backbone import ROOM
from mmspec.targets.readers.guidance import guided, scale_of
from mmspec.targets.readers.hooks import check_states
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context

Network = Callable[[Tensor, Tensor | None, Tensor, Cache], Tensor]  # states, mask, positions, cache


@dataclass(frozen=True, eq=False)
class OfLastStates(DraftModel):
    """Distributions that heads say of the target's last states.

    Raises ValueError at construction for heads of another target, and for a target without states
    to offer.
    """

    backbone: Reader  # the target's
    heads: Any
    sees: ClassVar[str] = STATES
    wants: ClassVar[frozenset[str]] = frozenset({"hidden"})

    def __post_init__(self) -> None:
        check_heads(self.heads, self.backbone)

    @property
    def networks(self) -> Sequence[nn.Module]:
        return (self.heads,)


def check_heads(heads: Any, target: Reader) -> None:
    """Refuse a network that was not made for this target's states. Raises ValueError."""
    check_states(target)
    ours = (int(target.config.hidden_size), target.vocabulary)
    theirs = (heads.feature_size, heads.config.vocab_size)
    if ours != theirs:
        raise ValueError(
            f"this {type(heads).__name__} is for states {theirs[0]} wide over {theirs[1]} tokens, "
            f"but {type(target.model).__name__} has states {ours[0]} wide over {ours[1]} tokens; "
            "train one for this target with `mmspec train`"
        )


def check_axes(head: Any, target: Reader) -> None:
    """Refuse a head that turns on three axes where the target's are not known. Raises ValueError.

    A class turns on them by its configuration; who reads it knows of them by its family.
    """
    if head.config.positions != "mrope" or target.family.rope_axes == 3:
        return
    name = type(target.model).__name__
    rope = getattr(target.config, "rope_parameters", None) or {}
    if rope.get("mrope_section"):
        raise ValueError(
            f"this head turns on three axes (M-RoPE), and so does {name}, but its positions are "
            "not read for heads yet; train a head with positions='keep' for it, such as eagle-2"
        )
    raise ValueError(
        f"this head turns on three axes (M-RoPE), but {name} on one; train a head with "
        "positions='keep' for it"
    )


def prompt_padding(context: Context, count: int) -> list[int]:
    """Slots per row that nobody sees, of the last `count` that the target has read."""
    before = max(context.memory.kept[0] - count, 0)  # slots of earlier turns
    return [max(pad - before, 0) for pad in context.memory.padding]


def read_prompt(
    config: Any, context: Context, states: Tensor, network: Network
) -> tuple[Memory, Tensor]:
    """Let a network read states (R, L, D) of a prompt: its memory, and what it gives (R, L, D)."""
    count, pads = states.shape[1], prompt_padding(context, states.shape[1])
    cache = SlotCache(config, count + 1 + min(context.request.room + 64, ROOM))
    cache.plan_uniform(0, count)
    slots = torch.arange(count, device=states.device)
    start = torch.tensor(pads, device=states.device)[:, None]
    mask = slots >= start if any(pads) else None
    read = network(states, mask, (slots - start).clamp_min(0), cache)
    return Memory(cache, count, pads, [count - pad for pad in pads], states[:0, 0]), read


def kept_states(context: Context, news: News, name: str) -> list[Tensor]:  # (n, D) per row
    """The target's states of the tokens that were kept and read, R rows of them."""
    states, found = news.scores.features[name], []
    for row in range(len(states)):
        path = news.kept.path[row % context.batch]
        places = [0, *(node + 1 for node in path)]
        found.append(states[row, places[: len(news.kept.tokens[row % context.batch])]])
    return found


def side_by_side(rows: Sequence[Tensor]) -> Tensor:  # (n, D) each -> (R, width, D)
    """Rows of different lengths as one tensor, padded on the left."""
    width = max(map(len, rows))
    fill = [own.new_zeros(width - len(own), own.shape[-1]) for own in rows]
    return torch.stack([torch.cat(pair) for pair in zip(fill, rows, strict=True)])


def guided_logits(context: Context, logits: Tensor) -> Tensor:  # (R, n, V) -> (B, n, V)
    """Logits of both branches of guidance, brought together by the request's scale.

    Without guidance R is B, and they stay as they are.
    """
    guides = len(logits) > context.batch
    return guided(logits, scale_of(context.request.inputs)) if guides else logits
