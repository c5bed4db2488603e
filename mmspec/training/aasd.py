"""Train a head on the target's keys and values, as in drafting (AASD)."""

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
from mmspec.drafters.neural.kv import split_images
from mmspec.models.heads.aasd import AasdHead, AasdHeadConfig, KvProjector
from mmspec.targets.memory import Memory, build_block
from mmspec.targets.readers.attention_tap import check_whole
from mmspec.targets.readers.reader import Reader
from mmspec.training.fitting import TrainingProgress, silent
from mmspec.training.heads import TrainingExample
from mmspec.training.losses import soft_cross_entropy
from mmspec.training.trainable import HeadTraining, train_head


@dataclass(frozen=True)
class TargetKv:
    """Keys and values of one target layer: L slots of the prompt, T of the response."""

    keys: Tensor  # (B, G, L + T, d)
    values: Tensor  # (B, G, L + T, d)
    visible: Tensor  # (B, L) bool: text of the prompt
    images: list[list[Tensor]]  # slots of every image, per row
    embeds: Tensor  # (B, T, D) of response tokens
    positions: Tensor  # (B, T), or (3, B, T) with M-RoPE
    next: Tensor  # (B, T, D) last hidden states of response tokens
    real: Tensor  # (B, T) bool, False = padding


@dataclass(frozen=True)
class PrefixKv:
    """Acts as a cache: fixed keys and values (B, G, n, d) precede new ones."""

    keys: Tensor
    values: Tensor

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Concatenate fixed and new ones."""
        return torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)


@torch.no_grad()
def read_kv(reader: Reader, example: TrainingExample, layer: int) -> TargetKv:
    """Run the target on an example. Raises ValueError for prompts without token ids."""
    check_whole(reader.model, "keys and values")
    ids, tokens = example.inputs.get("input_ids"), example.tokens.clamp_min(0)
    memory, _, _ = reader.prefill(example.inputs, extra_slots=tokens.shape[1])
    if ids is None or not isinstance(memory, Memory) or memory.is_stepwise:
        raise ValueError(
            "the image slots of this example are unknown: it has no input_ids, or its model "
            "prefills in several steps; train another recipe, such as eagle-2"
        )
    slots = memory.lengths[0]
    layout = build_block(tokens[:, :1].tolist(), Draft.chain(tokens[:, 1:], Kind.DET), memory.like)
    _, after = reader.read(memory, layout, hidden=True)
    assert after is not None
    positions, _, _ = memory.place(layout)
    positions = memory.spread_axes(positions)[-3:] if memory.axes > 1 else positions
    start = torch.tensor(list(memory.padding), device=ids.device)[:, None]
    is_visual = torch.isin(ids, ids.new_tensor(reader.placeholder_ids))
    is_visual[:, -1] = False  # as in drafting: the last slot counts as text
    layer_cache = memory.cache.layers[layer]
    stop = slots + tokens.shape[1]
    return TargetKv(
        layer_cache.keys[:, :, :stop],
        layer_cache.values[:, :, :stop],
        ~is_visual & (torch.arange(slots, device=ids.device) >= start),
        [split_images(row.nonzero()[:, 0]) for row in is_visual],
        reader.embed(tokens),
        positions.expand(*positions.shape[:-2], len(tokens), -1),
        after,
        example.tokens >= 0,
    )


def project_images(read: TargetKv, projector: KvProjector) -> tuple[Tensor, Tensor, Tensor]:
    """Project keys and values of all images: (B, G, m, d) each, and a mask (B, m) of real ones."""
    rows = []
    for row, pictures in enumerate(read.images):
        made = [projector(read.keys[row][:, at], read.values[row][:, at]) for at in pictures]
        none = read.keys[row][:, :0], read.values[row][:, :0]
        rows.append([torch.cat(parts, 1) for parts in zip(none, *made, strict=True)])
    size = max(keys.shape[1] for keys, _ in rows)
    keys, values = (
        torch.stack([functional.pad(row[at], (0, 0, 0, size - row[at].shape[1])) for row in rows])
        for at in (0, 1)
    )
    counts = torch.tensor([[row.shape[1]] for row, _ in rows], device=keys.device)
    return keys, values, torch.arange(size, device=keys.device) < counts


def predict_states(head: AasdHead, read: TargetKv, own: int) -> Tensor:  # (B, T, D)
    """States of the head for every token, whose last `own` tokens count as drafted."""
    batch, length = read.real.shape
    keys, values, is_real = project_images(read, head.projector)
    position = torch.arange(length, device=keys.device)
    gap = position[:, None] - position  # (T, T): distance from key to query
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
    given = PrefixKv(torch.cat((read.keys, keys), 2), torch.cat((read.values, values), 2))
    out: Tensor = head(read.embeds, mask, read.positions, given)
    return out


def aasd_loss(
    reader: Reader,
    head: AasdHead,
    example: TrainingExample,
    longest: int = 5,
    state_weight: float = 1.0,
) -> Tensor:  # ()
    """Cross entropy against the target's distributions, and smooth L1 of its last states.

    Yang et al. 2025: as in drafting, the keys of the last tokens are the head's own, those before
    them the target's. The number of own keys is sampled from 1 to `longest` for every example.
    Reconstructed: the weights.
    """
    read = read_kv(reader, example, head.config.kv_layer)
    own = int(torch.randint(1, longest + 1, ()))
    states, labels = predict_states(head, read, own)[read.real], read.next[read.real]
    loss = soft_cross_entropy(reader.head(states), reader.head(labels))
    return loss + state_weight * functional.smooth_l1_loss(states, labels)


def new_aasd_head(target: Reader, counts: Tensor, **changes: Any) -> AasdHead:
    """Make an untrained head for a target."""
    return AasdHead(AasdHeadConfig.of(target.config, target.vocabulary, **changes))


AASD = HeadTraining(new_aasd_head, aasd_loss, check_aasd, rate=1e-4)


def train_aasd(
    reader: Reader,
    head: AasdHead,
    examples: Iterator[TrainingExample],
    steps: int,
    rate: float = AASD.rate,
    progress: TrainingProgress = silent,
    **settings: Any,
) -> None:
    """Train head and projection; `settings` are those of `aasd_loss`. The target is frozen.

    Raises ValueError for a head of another target.
    """
    training = replace(AASD, loss=partial(aasd_loss, **settings))
    train_head(training, reader, head, examples, steps, rate, progress)
