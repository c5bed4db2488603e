"""What one call of a model that draws with picture tokens takes on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from mmspec.modality import setting


@dataclass(frozen=True)
class ImageSettings:
    """How freely and how large to draw, and what to show and to judge."""

    temperature: float = setting(1.0, "0 is greedy.", min=0)
    guidance: float | None = setting(None, "The published scale if not said, 1 = none.", min=0)
    codes: str | None = setting(
        None, "Size of one picture in codes, rows x columns as in 24x24, if it can vary."
    )
    grid: str | None = setting(None, "A sheet of pictures, as in 4x4.", only="generate")
    steps_map: str | None = setting(
        None,
        "A file for a map of the round each patch came in.",
        only="generate",
        writes=True,
    )
    pictures: int = setting(
        128, "How many the judge looks at; 0 = those that are timed.", min=0, only="bench"
    )
