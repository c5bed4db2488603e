"""What one walk takes on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modality import setting


@dataclass(frozen=True)
class MarkovSettings:
    """How far to walk, and how freely."""

    days: int = setting(24, "States to walk on.", min=1)
    temperature: float = setting(1.0, "0 always takes the likeliest state.", min=0)
