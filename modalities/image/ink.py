"""How many codes with ink a round keeps: a ground is easily guessed, a thing is not.

Fewer calls may be won on what hardly needed a call. So codes are counted where a prompt calls for
something, per round that kept any of them: one for plain decoding, in whatever order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.modality import Quality, RunResult, RunResults
from mmspec.zoo.boards import board
from mmspec.zoo.scene import BOARD, Scene


def ink_per_round(scenes: Sequence[Scene]) -> Quality:
    """Codes with ink per round that kept ink, of pictures of scenes; weighted by such rounds."""

    def values(answers: Sequence[RunResult], others: RunResults) -> list[tuple[float, float]]:
        if any(answer.rounds is None for answer in answers):
            return []
        turns = [of_one for answer in answers for of_one in answer.rounds]
        return [_kept(scene, one) for scene, one in zip(scenes, turns, strict=True)]

    return Quality("ink per round", values)


def has_ink(scene: Scene, height: int, width: int) -> Tensor:  # -> (H, W) bool
    """Which codes of a picture are in places where the scene has something."""
    is_taken = (board(scene)[:, 0] > 0).view(BOARD, BOARD)
    row, column = (torch.arange(size) * BOARD // size for size in (height, width))
    return is_taken[row[:, None], column]


def _kept(scene: Scene, rounds: Tensor) -> tuple[float, float]:
    height, width = rounds.shape
    inked = rounds.cpu()[has_ink(scene, height, width)]
    count = len(inked.unique())
    return len(inked) / max(count, 1), float(count)
