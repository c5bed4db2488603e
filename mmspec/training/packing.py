"""Pack the rows of a training example into fewer sequences, for the head's own computation.

    rows        a a a a . .      packed   a a a a b b b
                . b b b . .               . . c c c c c
                c c c c c .

A token attends to those of its own row alone, and positions restart in each row, so losses and
gradients are those of the rows up to rounding. The target reads rows as before.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmspec.drafters.neural.head_prompt import PackedSegments
from mmspec.errors import check_number
from mmspec.models.heads.state_head import StateHead

if TYPE_CHECKING:  # circular import
    from mmspec.training.heads import TargetOutputs
    from mmspec.training.trainable import DrafterTraining


TRIED = 16  # numbers of sequences that are tried


def assign_rows(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Assign rows of `sizes` tokens to sequences of at most `length`, with little padding.

    The better one of first fit, longest first, and of equal loads for some numbers of sequences; it
    is never worse than one row in each. A longer row is a sequence of its own. Sequences, and rows
    in them, are in the order of rows.
    """
    length, count = max(length, *sizes), len(sizes)
    least = -(-sum(sizes) // length)
    tried = [_balance(sizes, number) for number in range(least, min(least + TRIED, count))]
    tried += [_fill(sizes, length), [[row] for row in range(count)]]
    found, best = tried[-1], (count * max(sizes), max(sizes))
    for one in tried:
        longest = max(sum(sizes[row] for row in rows) for rows in one)
        slots = (longest * len(one), longest)
        if longest <= length and slots < best:
            found, best = one, slots
    return sorted(map(sorted, found))


def _fill(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Rows by sequence: each in the first one with room for it."""
    found: list[list[int]] = []
    free: list[int] = []
    for row in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        at = next((at for at, room in enumerate(free) if room >= sizes[row]), len(found))
        if at == len(found):
            found.append([])
            free.append(length)
        found[at].append(row)
        free[at] -= sizes[row]
    return found


def _balance(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Rows by sequence: each in the shortest one so far."""
    found: list[list[int]] = [[] for _ in range(number)]
    heap = [(0, at) for at in range(number)]
    for row in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        used, at = heap[0]
        found[at].append(row)
        heapq.heapreplace(heap, (used + sizes[row], at))
    return found


def count_slots(sizes: Sequence[tuple[int, int]], length: int | None) -> int:
    """Tokens, padding included, of a batch of rows of (prompt, response) tokens.

    With `length` they are packed.
    """
    if length is None:
        return len(sizes) * (max(one for one, _ in sizes) + max(one for _, one in sizes))
    whole = list(map(sum, sizes))
    sequences = assign_rows(whole, length)
    return len(sequences) * max(sum(whole[row] for row in rows) for rows in sequences)


def measure_padding(
    batches: Sequence[Sequence[tuple[int, int]]], length: int | None
) -> tuple[float, float]:
    """Mean tokens of a batch without padding, and the share of padding in all batches."""
    real = sum(sum(map(sum, one)) for one in batches)
    return real / len(batches), 1 - real / sum(count_slots(one, length) for one in batches)


def check_packing(training: DrafterTraining, head: Any, length: int) -> None:
    """Refuse a loss, or a head, whose rows cannot share a sequence. Raises ValueError."""
    check_number("--pack", length, 1, whole=True, example=2048)
    problem = None
    if not training.is_packable:
        problem = f"the loss of a {type(head).__name__} lays out rows in a way of its own"
    elif not isinstance(head, StateHead):
        problem = f"a {type(head).__name__} reads no slots of the target's states"
    elif head.has_first_slot:
        problem = f"a {type(head).__name__} has a slot in front of each row"
    elif head.attention:
        problem = f"a {type(head).__name__} reads the target's attention over whole rows"
    elif head.config.visual_slots == "compressed":
        problem = "visual_slots='compressed' compresses the images of a row by its question"
    if problem is not None:
        raise ValueError(
            f"--pack {length} puts several rows into one sequence, but {problem}; drop --pack"
        )


def pack_outputs(read: TargetOutputs, length: int) -> TargetOutputs:
    """Pack rows into sequences of at most `length` tokens, padded on the left.

    `next` and `real` become those of all response tokens of a sequence, padded on the left.
    """
    prompt, width, device = read.prompt, read.next.shape[1], read.next.device
    slots, counts = prompt.embeds.shape[1], read.real.sum(-1).tolist()
    starts = list(prompt.padding)
    sizes = [slots - width + n - pad for pad, n in zip(starts, counts, strict=True)]
    sequences = assign_rows(sizes, length)
    tokens = [[(row, starts[row], sizes[row]) for row in rows] for rows in sequences]
    responses = [[(row, 0, counts[row]) for row in rows] for rows in sequences]
    index, ids = (one.to(device) for one in _index(tokens, slots))
    where, rows = (one.to(device) for one in _index(responses, width))
    prompt_sizes = torch.tensor(sizes) - torch.tensor(counts) + torch.tensor(starts)
    is_response = index % slots >= prompt_sizes.to(device)[index // slots]
    packed = replace(
        prompt,
        embeds=prompt.embeds.flatten(0, 1)[index],
        features=prompt.features.flatten(0, 1)[index],
        padding=tuple((ids < 0).sum(-1).tolist()),
        tokens=None if prompt.tokens is None else prompt.tokens.flatten()[index],
        positions=_pack_positions(prompt.positions, len(counts), index),
        segments=PackedSegments(ids, is_response & (ids >= 0)),
        response_length=where.shape[1],
    )
    after = read.next.flatten(0, 1)[where]
    return replace(read, prompt=packed, next=after, real=rows >= 0, rows=rows, longest=max(counts))


def _index(
    sequences: Sequence[Sequence[tuple[int, int, int]]], stride: int
) -> tuple[Tensor, Tensor]:  # (P, S) each
    """Flat indices of spans (row, start, size), and their rows; -1 = padding on the left."""
    width = max(sum(size for _, _, size in spans) for spans in sequences)
    index = torch.zeros(len(sequences), width, dtype=torch.int64)
    ids = torch.full_like(index, -1)
    for at, spans in enumerate(sequences):
        end = width
        for row, start, size in reversed(spans):
            first = row * stride + start
            index[at, end - size : end] = torch.arange(first, first + size)
            ids[at, end - size : end] = row
            end -= size
    return index, ids


def _pack_positions(positions: Tensor | None, rows: int, index: Tensor) -> Tensor | None:
    if positions is None:
        return None
    return positions.expand(*positions.shape[:-2], rows, -1).flatten(-2)[..., index]
