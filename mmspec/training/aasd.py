"""Teach a head on the target's keys and values what drafting will show it (AASD)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmspec.draft import Draft, Kind
from mmspec.drafters.neural.aasd import check_aasd
from mmspec.drafters.neural.kv import pictures_of
from mmspec.models.heads.aasd import AasdHead, AasdHeadConfig, KvProjector
from mmspec.targets.memory import Memory, block
from mmspec.targets.readers.reader import Reader
from mmspec.training.heads import Lesson
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.reporting import Report, silent
from mmspec.training.trainable import HeadTraining, learn


@dataclass(frozen=True)
class ReadKv:
    """A lesson as a target remembers it in one layer: L slots of the prompt, T of the answer."""

    keys: Tensor  # (B, G, L + T, d)
    values: Tensor  # (B, G, L + T, d)
    visible: Tensor  # (B, L) bool: text of the prompt
    pictures: list[list[Tensor]]  # slots of every picture, per row
    embeds: Tensor  # (B, T, D) of the answer's tokens
    positions: Tensor  # (B, T), or (3, B, T) with M-RoPE
    next: Tensor  # (B, T, D) last states of the answer's tokens
    real: Tensor  # (B, T) bool, False = behind the end of a row


@dataclass(frozen=True)
class GivenKv:
    """Stands for a cache: keys and values (B, G, n, d) in front of whatever is read."""

    keys: Tensor
    values: Tensor

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        """Both, the given ones first."""
        return torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)


@torch.no_grad()
def read_kv(reader: Reader, lesson: Lesson, layer: int) -> ReadKv:
    """Let the target read a lesson. Raises ValueError where the prompt is not of tokens."""
    ids, tokens = lesson.inputs.get("input_ids"), lesson.tokens.clamp_min(0)
    memory, _, _ = reader.prefill(lesson.inputs, room=tokens.shape[1])
    if ids is None or not isinstance(memory, Memory) or memory.is_stepwise:
        raise ValueError(
            "keys and values of this lesson cannot be told apart: it is of embeddings, or its "
            "model reads in steps of its own; train another recipe, such as eagle-2"
        )
    slots = memory.kept[0]
    layout = block(tokens[:, :1].tolist(), Draft.chain(tokens[:, 1:], Kind.DET), memory.like)
    _, after = reader.read(memory, layout, hidden=True)
    assert after is not None
    positions, _, _ = memory.place(layout)
    positions = memory.on_axes(positions)[-3:] if memory.axes > 1 else positions
    start = torch.tensor(list(memory.padding), device=ids.device)[:, None]
    is_visual = torch.isin(ids, ids.new_tensor(reader.placeholder_ids))
    is_visual[:, -1] = False  # as in drafting: the last slot counts as text
    kept = memory.cache.layers[layer]
    stop = slots + tokens.shape[1]
    return ReadKv(
        kept.keys[:, :, :stop],
        kept.values[:, :, :stop],
        ~is_visual & (torch.arange(slots, device=ids.device) >= start),
        [pictures_of(row.nonzero()[:, 0]) for row in is_visual],
        reader.embed(tokens),
        positions.expand(*positions.shape[:-2], len(tokens), -1),
        after,
        lesson.tokens >= 0,
    )


def projected(read: ReadKv, projector: KvProjector) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (B, G, m, d) of all pictures, projected, and which are real (B, m)."""
    rows = []
    for row, pictures in enumerate(read.pictures):
        made = [projector(read.keys[row][:, at], read.values[row][:, at]) for at in pictures]
        none = read.keys[row][:, :0], read.values[row][:, :0]
        rows.append([torch.cat(parts, 1) for parts in zip(none, *made, strict=True)])
    most = max(keys.shape[1] for keys, _ in rows)
    keys, values = (
        torch.stack([functional.pad(row[at], (0, 0, 0, most - row[at].shape[1])) for row in rows])
        for at in (0, 1)
    )
    counts = torch.tensor([[row.shape[1]] for row, _ in rows], device=keys.device)
    return keys, values, torch.arange(most, device=keys.device) < counts


def said_behind(head: AasdHead, read: ReadKv, own: int) -> Tensor:  # (B, T, D)
    """What the head gives behind every token, the last `own` being drafted, itself included."""
    batch, length = read.real.shape
    keys, values, is_real = projected(read, head.projector)
    place = torch.arange(length, device=keys.device)
    gap = place[:, None] - place  # (T, T): how far a key lies behind a query
    by_target, by_head = gap >= own, (gap >= 0) & (gap < own)
    seen = torch.cat(
        (
            read.visible[:, None].expand(-1, length, -1),
            by_target.expand(batch, -1, -1),
            is_real[:, None].expand(-1, length, -1),
            by_head.expand(batch, -1, -1),
        ),
        2,
    )
    hide = torch.finfo(read.embeds.dtype).min
    mask = torch.zeros_like(seen, dtype=read.embeds.dtype).masked_fill(~seen, hide)[:, None]
    given = GivenKv(torch.cat((read.keys, keys), 2), torch.cat((read.values, values), 2))
    out: Tensor = head(read.embeds, mask, read.positions, given)
    return out


def aasd_loss(
    reader: Reader, head: AasdHead, lesson: Lesson, longest: int = 5, state_weight: float = 1.0
) -> Tensor:  # ()
    """Cross entropy against the target's distributions, and smooth L1 of its last states.

    Yang et al. 2025: as in drafting, keys of the last 1 to `longest` tokens, drawn anew for every
    lesson, are the head's own, and those before them the target's. Reconstructed: the weights.
    """
    read = read_kv(reader, lesson, head.config.kv_layer)
    own = int(torch.randint(1, longest + 1, ()))
    states, wanted = said_behind(head, read, own)[read.real], read.next[read.real]
    loss = soft_cross_entropy(reader.head(states), reader.head(wanted))
    return loss + state_weight * functional.smooth_l1_loss(states, wanted)


def new_aasd_head(target: Reader, counts: Tensor, **changes: Any) -> AasdHead:
    """An untrained head for a target."""
    return AasdHead(AasdHeadConfig.of(target.config, target.vocabulary, **changes))


AASD = HeadTraining(new_aasd_head, aasd_loss, check_aasd, rate=1e-4)


def learn_aasd(
    reader: Reader,
    head: AasdHead,
    lessons: Iterator[Lesson],
    steps: int,
    rate: float = AASD.rate,
    progress: Report = silent,
    **settings: Any,
) -> None:
    """Train head and projection; `settings` are those of `aasd_loss`. The target is frozen.

    Raises ValueError for a head of another target.
    """
    training = replace(AASD, loss=partial(aasd_loss, **settings))
    learn(training, reader, head, lessons, steps, rate, progress)
