"""What a head on the target's states reads of a prompt: which slots, with what, and where.

prompt    text  pic  pic  pic  text  text        slot t reads embedding t + 1 and state t
fused      0     1    2    3    4                pictures like text
hidden     .     .    .    3    4                slots that would read a picture are left out
raw       (0)   (1)  (2)   3    4                ( ) = the embedding alone goes in
compressed .     .   (c)   3    4                few inputs c stand for all of a picture

Of slots that would read a picture, a head may read the share that the question attends to most
(`visual_keep`). A head that reads the first token has one slot more in front, without a state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import isqrt

import torch
from torch import Tensor

from mmspec.compressors.contract import Features
from mmspec.compressors.dream_topk import DreamTopK
from mmspec.models.heads.state_head import PictureSlots, SlotMarks, StateHead
from mmspec.targets.readers.reader import Reader


@dataclass(frozen=True)
class ReadPrompt:
    """What a target has read: R rows (B, or 2B with both branches of guidance), L slots.

    `tokens` are None where they are not known, or not those of all rows.
    """

    embeds: Tensor  # (R, L, H)
    features: Tensor  # (R, L, k * H)
    padding: Sequence[int]  # slots per row that nobody sees
    tokens: Tensor | None = None  # (R, L)
    positions: Tensor | None = None  # (R, L) or (axes, R, L), as the target was told them
    attention: Mapping[str, Tensor] = field(default_factory=dict)  # (R, L) each: to every token
    answered: int = 0  # so many of the last tokens are the answer to it already


@dataclass(frozen=True)
class HeadPrompt:
    """The slots (R, n) that a head reads of it, padded on the left, and where the next ones go."""

    embeds: Tensor  # (R, n, D)
    states: Tensor  # (R, n, D)
    marks: SlotMarks
    pads: list[int]
    positions: Tensor  # (R, n), or (3, R, n) with M-RoPE
    rope: list[int]  # rotary position of the slot behind them, per row
    offsets: Tensor | None  # (3, R, 1) what each axis adds to it

    @property
    def seen(self) -> Tensor:  # (R, n) bool
        """What is no padding."""
        place = torch.arange(self.embeds.shape[1], device=self.embeds.device)
        return place >= torch.tensor(self.pads, device=place.device)[:, None]

    @property
    def global_vector(self) -> Tensor | None:  # (R, 1, D)
        """What slots behind the prompt are told of pictures."""
        told = self.marks.global_vector
        return None if told is None else told[:, -1:]


def head_prompt(
    head: StateHead, target: Reader, prompt: ReadPrompt, visual_slots: str | None = None
) -> HeadPrompt:
    """Lay out a prompt for a head, which makes states of the features.

    `visual_slots` takes the place of what the head was trained with. Raises ValueError where
    pictures are to be told apart in a prompt whose tokens are not known.
    """
    prompt = with_first(prompt) if head.reads_first else prompt
    visual_slots = visual_slots or head.config.visual_slots
    inputs, raw, told = prompt.embeds[:, 1:], None, None
    slots = inputs.shape[1]
    place = torch.arange(slots, device=inputs.device)
    start = torch.tensor(list(prompt.padding), device=inputs.device)[:, None]
    kept = place >= start  # (R, slots)
    is_thinned = head.config.visual_keep < 1
    if (visual_slots != "fused" or is_thinned) and target.placeholder_ids:
        tokens = _known(prompt.tokens)[:, 1:]
        visual = torch.isin(tokens, tokens.new_tensor(target.placeholder_ids)) & kept
        if visual_slots == "placeholder":
            inputs = (head.embeddings or target.embed)(tokens)
        elif visual_slots == "hidden":
            kept = kept & ~visual
        elif visual_slots == "raw":
            raw = visual
        elif visual_slots == "compressed":
            inputs, raw, told = _compressed(head, target, prompt, visual)
            kept = kept & (raw | ~visual)
        if is_thinned:
            kept = kept & (attended(prompt, visual, head.config.visual_keep) | ~visual)
    elif head.embeddings is not None:
        inputs = head.embeddings(_known(prompt.tokens)[:, 1:])
    where, pads = _packed(kept)
    rows = torch.arange(len(where), device=where.device)[:, None]
    marks = SlotMarks(
        raw=None if raw is None else raw[rows, where],
        global_vector=None if told is None else told[rows, where],
        stateless=where == start if head.reads_first else None,
    )
    positions, rope, offsets = _positions(head.config.positions, prompt, where, start, pads)
    states = head.fused(prompt.features[rows, where])
    return HeadPrompt(inputs[rows, where], states, marks, pads, positions, rope, offsets)


def with_first(prompt: ReadPrompt) -> ReadPrompt:
    """The same with one more token in front of each row, whose slot reads the first one."""

    def behind_one(value: Tensor) -> Tensor:
        return torch.cat((value[:, :1], value), 1)

    positions, tokens = prompt.positions, prompt.tokens
    features = torch.cat((torch.zeros_like(prompt.features[:, :1]), prompt.features), 1)
    return replace(
        prompt,
        embeds=behind_one(prompt.embeds),
        features=features,
        tokens=None if tokens is None else behind_one(tokens),
        positions=None if positions is None else torch.cat((positions[..., :1], positions), -1),
        attention={name: behind_one(one) for name, one in prompt.attention.items()},
    )


def attended(prompt: ReadPrompt, visual: Tensor, keep: float) -> Tensor:  # (R, slots) bool
    """Of the `visual` slots (R, slots) those that the question attends to most, per picture.

    Pictures that touch are one.
    """
    found, design = torch.zeros_like(visual), DreamTopK(keep)
    for name in design.needs:
        scores = prompt.attention[name][:, 1:]  # a slot reads the token behind its own
        for row, seen in enumerate(visual.tolist()):
            for first, stop in runs(seen):
                where = torch.arange(first, stop, device=visual.device)
                picture = Features(prompt.embeds[row, 1:][where], where)
                left = design.compress(picture, {name: scores[row, where]})
                found[row, left.positions] = True
    return found


def runs(marks: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First place of every run of marks, and the place behind it."""
    at = 0
    for is_marked, run in groupby(marks):
        first, at = at, at + len(list(run))
        if is_marked:
            yield first, at


def _known(tokens: Tensor | None) -> Tensor:
    if tokens is None:
        raise ValueError(
            "this head tells pictures from text by the tokens of a prompt, and they must be known: "
            "give a prompt of ids alone, without guidance, or a head that reads all slots alike "
            "(recipe 'eagle')"
        )
    return tokens


def _packed(kept: Tensor) -> tuple[Tensor, list[int]]:  # (R, slots) bool
    """Slots (R, n) that are kept, in order and padded on the left, and the padding of each row."""
    counts = kept.sum(-1)
    width = int(counts.max())
    place = torch.arange(kept.shape[1], device=kept.device)
    last = torch.where(kept, place, -1).sort(-1).values[:, kept.shape[1] - width :]
    return last.clamp_min(0), (width - counts).tolist()


def _positions(
    policy: str, prompt: ReadPrompt, where: Tensor, start: Tensor, pads: Sequence[int]
) -> tuple[Tensor, list[int], Tensor | None]:
    """Positions of the slots that are read, and those of the next one."""
    slots, count = prompt.embeds.shape[1] - 1, where.shape[1]
    if policy == "mrope":
        assert prompt.positions is not None  # what turns on three axes tells its decoder where
        axes = prompt.positions[-3:].expand(3, len(where), -1)
        rope = [int(value) for value in axes[0, :, -1].tolist()]
        offsets = axes[:, :, -1:] - axes[:1, :, -1:]
        index = where.expand(3, -1, -1)
        return axes.gather(2, index), rope, offsets if bool(offsets.any()) else None
    if policy == "compact":
        place = torch.arange(count, device=where.device) - start.new_tensor(pads)[:, None]
        return place.clamp_min(0), [count - pad for pad in pads], None
    return (where - start).clamp_min(0), [slots - pad for pad in prompt.padding], None


def question_of(target: Reader, prompt: ReadPrompt, row: int) -> Tensor:  # (T, D)
    """Embeddings of a row's text behind the last picture of the prompt, or of all its text."""
    stop = prompt.embeds.shape[1] - prompt.answered
    tokens = _known(prompt.tokens)[row, prompt.padding[row] : stop]
    is_text = ~torch.isin(tokens, tokens.new_tensor(sorted(target.visual_ids)))
    later = is_text.long().flip(0).cumprod(0).flip(0).bool()
    asked = later if bool(later.any()) else is_text
    return prompt.embeds[row, prompt.padding[row] : stop][asked]


def _picture(
    target: Reader, prompt: ReadPrompt, row: int, slots: slice, question: Tensor
) -> PictureSlots:
    count = slots.stop - slots.start
    side = isqrt(count)
    return PictureSlots(
        prompt.embeds[row, 1:][slots],
        prompt.features[row, 1:][slots],
        prompt.features[row, slots],
        {name: one[row, 1:][slots] for name, one in prompt.attention.items()},
        question,
        (side, side) if target.family.square and side * side == count else None,
    )


def _compressed(
    head: StateHead, target: Reader, prompt: ReadPrompt, visual: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs with those that stand for pictures, where they stand, and global vectors by slot.

    Pictures that touch are one.
    """
    inputs, rows = prompt.embeds[:, 1:], []
    for row, seen in enumerate(visual.tolist()):
        own, raw = inputs[row], torch.zeros_like(visual[row])
        told = inputs.new_zeros(inputs.shape[1:])
        question = question_of(target, prompt, row) if any(seen) else inputs[row, :0]
        for first, at in runs(seen):
            glance = head.compressed(_picture(target, prompt, row, slice(first, at), question))
            taken = first + glance.at
            own = own.index_copy(0, taken, glance.inputs.to(own))
            raw[taken] = True
            if glance.vector is not None:
                told = torch.cat((told[:at], glance.vector.to(told).expand(len(told) - at, -1)))
        rows.append((own, raw, told))
    own, raw, told = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return own, raw, told
