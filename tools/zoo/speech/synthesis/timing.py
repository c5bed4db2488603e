"""About when each word of a sentence is said, by its letters: no aligner is needed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from mmspec.modalities.speech.utterances import Room
from tools.zoo.speech.synthesis.codec import HOP, RATE_HZ


def spans(words: Sequence[str], frames: int) -> list[int]:
    """Which of the words, by its place, is said in each of `frames`.

    A word lasts as long as its letters and one more; silence around counts for the words beside it.
    """
    room = Room()
    lead, tail = (round(one * RATE_HZ / HOP) for one in (room.lead_s, room.tail_s))
    ends = torch.tensor([*accumulate(len(word) + 1 for word in words)])
    ends = lead + ends * (max(frames - lead - tail, 1) / int(ends[-1]))
    places = torch.searchsorted(ends, torch.arange(frames) + 0.5)
    found: list[int] = places.clamp_max(len(words) - 1).tolist()
    return found
