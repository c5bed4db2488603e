"""The slots of a prompt that a head on the target's states reads, with their inputs and positions.

    prompt    text  img  img  img  text  text        slot t reads embedding t + 1 and state t
    fused      0     1    2    3    4                images like text
    hidden     .     .    .    3    4                slots that would read an image are left out
    raw       (0)   (1)  (2)   3    4                ( ) = the embedding alone
    compressed .     .   (c)   3    4                few inputs c replace all of an image

A head may read only the share of image slots that the question attends to most (`visual_keep`). A
head that reads the first token has one more slot in front, without a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from mmspec.compressors.contract import Features
from mmspec.compressors.dream_topk import DreamTopK
from mmspec.drafters.neural.target_heads import prompt_padding
from mmspec.models.heads.state_head import ImageSlots, SlotMarks, StateHead
from mmspec.models.llama_layers import FULL, SLIDING
from mmspec.targets.cache import SlotCache
from mmspec.targets.prompts import PromptCache, PromptTensors, make_masks
from mmspec.targets.readers.reader import Reader
from mmspec.targets.tokens.context import Context


@dataclass(frozen=True)
class PackedSegments:
    """The rows of training examples that were packed into one sequence, by token or by slot."""

    ids: Tensor  # (R, L) int64, number of the row; -1 = padding
    is_response: Tensor  # (R, L) bool, of the response of its row

    def at_slots(self, where: Tensor) -> PackedSegments:
        """The rows of the slots at `where` (R, n): slot t has the state of token t."""
        return PackedSegments(self.ids.gather(1, where), self.is_response[:, 1:].gather(1, where))


@dataclass(frozen=True)
class TargetPrompt:
    """The tokens a target has read: R rows (B, or 2B with both branches of guidance), L slots.

    `tokens` are None where they are unknown for some rows.
    """

    embeds: Tensor  # (R, L, H)
    features: Tensor  # (R, L, k * H)
    padding: Sequence[int]  # padding slots per row
    tokens: Tensor | None = None  # (R, L)
    positions: Tensor | None = None  # (R, L) or (axes, R, L), position ids of the target
    attention: Mapping[str, Tensor] = field(default_factory=dict)  # (R, L) each: to every token
    response_length: int = 0  # last tokens that belong to the response
    segments: PackedSegments | None = None  # None = one row per sequence


@dataclass(frozen=True)
class HeadPrompt:
    """The slots (R, n) that a head reads, padded on the left, and the position of the next ones."""

    embeds: Tensor  # (R, n, D)
    states: Tensor  # (R, n, D)
    marks: SlotMarks
    pads: list[int]
    positions: Tensor  # (R, n), or (3, R, n) with M-RoPE
    rope: list[int]  # rotary position of the next slot, per row
    offsets: Tensor | None  # (3, R, 1) offset of each axis
    segments: PackedSegments | None = None  # None = one row per sequence

    @property
    def attention_mask(self) -> Tensor:  # (R, n) bool
        """True at slots that are not padding."""
        place = torch.arange(self.embeds.shape[1], device=self.embeds.device)
        return place >= torch.tensor(self.pads, device=place.device)[:, None]

    def causal_mask(self) -> Tensor:  # (R, 1, n, n) bool
        """True where a slot (second last axis) attends: earlier ones of its row, and itself."""
        count = self.embeds.shape[1]
        before = torch.ones(count, count, device=self.embeds.device).bool().tril()
        if self.segments is None:
            return self.attention_mask[:, None, None] & before
        rows = self.segments.ids
        return (rows[:, None, :, None] == rows[:, None, None]) & before

    def response_slots(self, count: int) -> Tensor:  # (R, count)
        """The slots that read the `count` response tokens; padded on the left if packed."""
        if self.segments is not None:
            return pack_slots(self.segments.is_response)[0]
        stop = self.embeds.shape[1]
        return torch.arange(stop - count, stop, device=self.embeds.device).expand(
            len(self.embeds), -1
        )

    @property
    def global_vector(self) -> Tensor | None:  # (R, 1, D)
        """The image vector of slots after the prompt."""
        vectors = self.marks.global_vector
        return None if vectors is None else vectors[:, -1:]


def head_prompt(
    head: StateHead, target: Reader, prompt: TargetPrompt, visual_slots: str | None = None
) -> HeadPrompt:
    """Select the slots of a prompt for a head, which fuses the features to states.

    `visual_slots` overrides the head's configuration. Raises ValueError where images must be
    distinguished from text in a prompt whose tokens are unknown.
    """
    prompt = prepend_first_token(prompt) if head.has_first_slot else prompt
    visual_slots = visual_slots or head.config.visual_slots
    inputs, raw, vectors = prompt.embeds[:, 1:], None, None
    slots = inputs.shape[1]
    place = torch.arange(slots, device=inputs.device)
    start = torch.tensor(list(prompt.padding), device=inputs.device)[:, None]
    is_kept = place >= start  # (R, slots)
    if prompt.segments is not None:  # no slot reads two rows
        ids = prompt.segments.ids
        is_kept = is_kept & (ids[:, 1:] == ids[:, :-1])
        start = place - index_in_segment(ids)[:, :-1]
    is_thinned = head.config.visual_keep < 1
    if (visual_slots != "fused" or is_thinned) and target.placeholder_ids:
        tokens = require_tokens(prompt.tokens)[:, 1:]
        visual = torch.isin(tokens, tokens.new_tensor(target.placeholder_ids)) & is_kept
        if visual_slots == "placeholder":
            inputs = (head.embeddings or target.embed)(tokens)
        elif visual_slots == "hidden":
            is_kept = is_kept & ~visual
        elif visual_slots == "raw":
            raw = visual
        elif visual_slots == "compressed":
            inputs, raw, vectors = _compress_images(head, target, prompt, visual)
            is_kept = is_kept & (raw | ~visual)
        if is_thinned:
            is_kept = is_kept & (select_attended(prompt, visual, head.config.visual_keep) | ~visual)
    elif head.embeddings is not None:
        inputs = head.embeddings(require_tokens(prompt.tokens)[:, 1:])
    where, pads = pack_slots(is_kept)
    rows = torch.arange(len(where), device=where.device)[:, None]
    marks = SlotMarks(
        raw=None if raw is None else raw[rows, where],
        global_vector=None if vectors is None else vectors[rows, where],
        stateless=where == start if head.has_first_slot else None,
    )
    segments = None if prompt.segments is None else prompt.segments.at_slots(where)
    start = start if segments is None else start.gather(1, where)
    given = (head.config.positions, prompt, where, start, pads, segments)
    positions, rope, offsets = _positions(*given)
    states = head.fuse(prompt.features[rows, where])
    return HeadPrompt(inputs[rows, where], states, marks, pads, positions, rope, offsets, segments)


def prepend_first_token(prompt: TargetPrompt) -> TargetPrompt:
    """The same with one more token at the start of each row, whose slot reads the first one."""

    def repeat_first(value: Tensor) -> Tensor:
        return torch.cat((value[:, :1], value), 1)

    positions, tokens = prompt.positions, prompt.tokens
    features = torch.cat((torch.zeros_like(prompt.features[:, :1]), prompt.features), 1)
    return replace(
        prompt,
        embeds=repeat_first(prompt.embeds),
        features=features,
        tokens=None if tokens is None else repeat_first(tokens),
        positions=None if positions is None else torch.cat((positions[..., :1], positions), -1),
        attention={name: repeat_first(one) for name, one in prompt.attention.items()},
    )


def select_attended(prompt: TargetPrompt, visual: Tensor, keep: float) -> Tensor:  # (R, slots) bool
    """Of the `visual` slots (R, slots) those that the question attends to most, per image.

    Adjacent images count as one.
    """
    found, design = torch.zeros_like(visual), DreamTopK(keep)
    for name in design.needs:
        scores = prompt.attention[name][:, 1:]  # a slot reads the token after its own
        for row, is_visual in enumerate(visual.tolist()):
            for first, stop in find_runs(is_visual):
                where = torch.arange(first, stop, device=visual.device)
                image = Features(prompt.embeds[row, 1:][where], where)
                left = design.compress(image, {name: scores[row, where]})
                found[row, left.positions] = True
    return found


def find_runs(marks: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First index of every run of marks, and the index after it."""
    at = 0
    for is_marked, run in groupby(marks):
        first, at = at, at + len(list(run))
        if is_marked:
            yield first, at


def require_tokens(tokens: Tensor | None) -> Tensor:
    if tokens is None:
        raise ValueError(
            "this head distinguishes images from text by the token ids of a prompt: give a prompt "
            "of ids only, without guidance, or a head that reads all slots alike (recipe 'eagle')"
        )
    return tokens


def pack_slots(is_kept: Tensor) -> tuple[Tensor, list[int]]:  # (R, slots) bool
    """Indices (R, n) of the kept slots, padded on the left, and the padding of each row."""
    counts = is_kept.sum(-1)
    width = int(counts.max())
    place = torch.arange(is_kept.shape[1], device=is_kept.device)
    last = torch.where(is_kept, place, -1).sort(-1).values[:, is_kept.shape[1] - width :]
    return last.clamp_min(0), (width - counts).tolist()


def index_in_segment(ids: Tensor) -> Tensor:  # (R, L) -> (R, L)
    """Index of each token, or slot, in its run of equal ids."""
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    is_first = torch.ones_like(ids, dtype=torch.bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return place - torch.where(is_first, place, 0).cummax(-1).values


def _positions(
    policy: str,
    prompt: TargetPrompt,
    where: Tensor,
    start: Tensor,
    pads: Sequence[int],
    segments: PackedSegments | None,
) -> tuple[Tensor, list[int], Tensor | None]:
    """Positions of the slots that are read, and of the next slot."""
    slots, count = prompt.embeds.shape[1] - 1, where.shape[1]
    if policy == "mrope":
        assert prompt.positions is not None  # a target with M-RoPE provides positions
        axes = prompt.positions[-3:].expand(3, len(where), -1)
        rope = [int(value) for value in axes[0, :, -1].tolist()]
        offsets = axes[:, :, -1:] - axes[:1, :, -1:]
        index = where.expand(3, -1, -1)
        return axes.gather(2, index), rope, offsets if bool(offsets.any()) else None
    if policy == "compact" and segments is not None:
        return index_in_segment(segments.ids), [count - pad for pad in pads], None
    if policy == "compact":
        place = torch.arange(count, device=where.device) - start.new_tensor(pads)[:, None]
        return place.clamp_min(0), [count - pad for pad in pads], None
    return (where - start).clamp_min(0), [slots - pad for pad in prompt.padding], None


def question_embeddings(target: Reader, prompt: TargetPrompt, row: int) -> Tensor:  # (T, D)
    """Embeddings of a row's text after the last image of the prompt, or of all its text."""
    stop = prompt.embeds.shape[1] - prompt.response_length
    tokens = require_tokens(prompt.tokens)[row, prompt.padding[row] : stop]
    is_text = ~torch.isin(tokens, tokens.new_tensor(sorted(target.visual_ids)))
    later = is_text.long().flip(0).cumprod(0).flip(0).bool()
    is_question = later if bool(later.any()) else is_text
    return prompt.embeds[row, prompt.padding[row] : stop][is_question]


def _image_slots(
    target: Reader, prompt: TargetPrompt, row: int, slots: slice, question: Tensor
) -> ImageSlots:
    count = slots.stop - slots.start
    side = isqrt(count)
    return ImageSlots(
        prompt.embeds[row, 1:][slots],
        prompt.features[row, 1:][slots],
        prompt.features[row, slots],
        {name: one[row, 1:][slots] for name, one in prompt.attention.items()},
        question,
        (side, side) if target.family.is_square and side * side == count else None,
    )


def _compress_images(
    head: StateHead, target: Reader, prompt: TargetPrompt, visual: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Inputs with those that replace images, their slots, and global vectors by slot.

    Adjacent images count as one.
    """
    inputs, rows = prompt.embeds[:, 1:], []
    for row, is_visual in enumerate(visual.tolist()):
        row_inputs, raw = inputs[row], torch.zeros_like(visual[row])
        vectors = inputs.new_zeros(inputs.shape[1:])
        question = question_embeddings(target, prompt, row) if any(is_visual) else inputs[row, :0]
        for first, at in find_runs(is_visual):
            glance = head.compress_image(
                _image_slots(target, prompt, row, slice(first, at), question)
            )
            taken = first + glance.at
            row_inputs = row_inputs.index_copy(0, taken, glance.inputs.to(row_inputs))
            raw[taken] = True
            if glance.vector is not None:
                vectors = torch.cat(
                    (vectors[:at], glance.vector.to(vectors).expand(len(vectors) - at, -1))
                )
        rows.append((row_inputs, raw, vectors))
    row_inputs, raw, vectors = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return row_inputs, raw, vectors


def read_target_prompt(context: Context, tap: str, attention: frozenset[str]) -> TargetPrompt:
    """The target's last prefill: the prompt, or the tokens added by a turn."""
    features = context.shared[tap]  # (R, L, k * H)
    count = features.shape[1]
    padding = prompt_padding(context, count)
    lengths = [count - pad for pad in padding[: context.batch]]
    tokens = None
    is_known = all(length <= own for length, own in zip(lengths, context.prompt, strict=True))
    if is_known and len(features) == context.batch:
        rows = zip(context.history, context.prompt, lengths, strict=True)
        ids = [[0] * (count - new) + row[end - new : end] for row, end, new in rows]
        tokens = torch.tensor(ids, dtype=torch.int64, device=features.device)
    shared = context.shared
    attention_maps = {name: shared[name][:, -count:] for name in attention}
    return TargetPrompt(
        shared["embeds"], features, padding, tokens, shared["positions"], attention_maps
    )


def repeat_last_states(known: Tensor, count: int) -> Tensor:  # (n, D) -> (count, D)
    """The last `count` states; the very last one is repeated where there are fewer."""
    index = torch.arange(count, device=known.device) + max(len(known) - count, 0)
    return known[index.clamp_max(len(known) - 1)]


def read_head_prompt(head: StateHead, prompt: HeadPrompt, cache: SlotCache) -> None:
    """Read a prompt of at least one slot into an empty cache."""
    cache.plan_uniform(0, prompt.embeds.shape[1])
    head(
        prompt.embeds,
        prompt.states,
        prompt.attention_mask if any(prompt.pads) else None,
        prompt.positions,
        past_key_values=cache,
        marks=prompt.marks,
    )


def read_compiled_prompt(
    graphs: Any, head: StateHead, prompt: HeadPrompt, cache: SlotCache, room: int
) -> None:
    """`read_head_prompt` by a graph of `graphs` (`BlockGraphs`), where it can."""
    graphs.follow(cache)
    tensors = collect_tensors(prompt)
    graphs.prompts.read(
        cache,
        tensors,
        room,
        lambda: make_compiled_prompt(head, tensors.names),
        lambda: read_head_prompt(head, prompt, cache),
        lambda out: 0.0,
    )


_MARKS = ("raw", "global_vector", "stateless")  # of `SlotMarks`, by slot


def collect_tensors(prompt: HeadPrompt) -> PromptTensors:
    """The inputs of a head for a compiled prompt."""
    shape = prompt.embeds.shape[:2]
    marks = {name: getattr(prompt.marks, name) for name in _MARKS}
    given = {
        name: one.expand(*shape, *one.shape[2:]) for name, one in marks.items() if one is not None
    }
    visible = prompt.attention_mask if any(prompt.pads) else None
    carriers = (prompt.embeds, prompt.states, *given.values())
    return PromptTensors(carriers, prompt.positions, visible, names=tuple(given))


def make_compiled_prompt(head: StateHead, names: Sequence[str]) -> Callable[..., list[Tensor]]:
    """A function of tensors alone that reads a prompt; only its keys and values are needed.

    `names` are the marks that it is given.
    """
    window = head.config.sliding_window
    kinds = (FULL,) if window is None else (FULL, SLIDING)

    def step(
        positions: Tensor,
        carriers: Sequence[Tensor],
        hidden: Tensor,
        masks: Sequence[Tensor],
        parts: Sequence[Tensor],
    ) -> list[Tensor]:
        embeds, states, *marks = carriers
        made = make_masks(hidden, kinds, window)
        own: Any = dict(zip(names, marks, strict=True))
        how: Any = {"past_key_values": PromptCache(parts), "marks": SlotMarks(**own)}
        head(embeds, states, made if window is not None else made[FULL], positions, **how)
        return []

    return step
