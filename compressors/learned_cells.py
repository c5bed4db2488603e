"""What learned compressors of cells share."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.compressors.cells import OfCells
from mmspec.compressors.learned import Learned


@dataclass(frozen=True)
class LearnedCells(OfCells, Learned):
    """A learned map of every cell of `stride` x `stride` features."""
